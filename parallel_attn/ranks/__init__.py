"""All ranks together: votes before a request runs, and on request a watch while it does. Nothing here touches a tensor.

The way of a call, models and offload know only `Peers`: the group's `Voters` unless a `Watch` is handed to them, and
`Alone` for one rank.
"""

from .peers import Alone, Peers
from .voters import Voters, voters_of
from .votes import AgreementError, Digest
from .watch import End, Watch

__all__ = ["AgreementError", "Alone", "Digest", "End", "Peers", "Voters", "Watch", "voters_of"]
