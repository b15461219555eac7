"""Print the page of everything that is refused, from the table that raises it.

python -m scripts.refusals > REFUSALS.md
"""

from __future__ import annotations

from parallel_attn.errors import table


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
        *(f"| {row.code} | {row.what} | {row.why} | {row.instead} |" for row in table(placeholder="…")),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
