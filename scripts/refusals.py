"""Print the page of everything that is refused, from the tables that raise it.

python -m scripts.refusals > REFUSALS.md
"""

from __future__ import annotations

from models import model_refusals
from parallel_attn import Refusal, errors

from .run import spelling


def rows() -> list[Refusal]:
    """Every refusal of the layer, of models and of commands, as a command line spells it."""
    tables = (errors.refuse, model_refusals.refuse, spelling.refuse)
    return [spelling.spelled_refusal(row) for table in tables for row in table.rows(placeholder="…")]


def page() -> str:
    """The page, in Markdown; "…" stands for a value of the request."""
    lines = [
        "# What is refused",
        "",
        "Before weights load where the flags or the config tell, else before the first collective of a call; every",
        "reason at once. Codes are stable. `python -m scripts.explain` lists what a set of flags is refused for.",
        "",
        "| code | what | why | instead |",
        "|---|---|---|---|",
        *(f"| {row.code} | {row.what} | {row.why} | {row.instead} |" for row in rows()),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
