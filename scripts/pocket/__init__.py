"""How `scripts.train_pocket` trains, judges and exports cosmos3-pocket."""
