"""What the ranks of a fault drill must say, which of them, and within how many seconds."""

from __future__ import annotations

WITHIN = 10.0
"""Seconds from the fault until every living rank has named it."""
STALL = 12.0
"""Stall timeout of the drills; a living rank that does not arrive is given up after it."""

# What every living rank of the faulty rank's group says; {r} is the faulty rank.
SAID = {
    "raises": r"rank {r} raised ZeroDivisionError: the drill's own",
    "raises_in_forward": r"rank {r} raised RuntimeError: shape",
    "one_branch_fails": r"rank {r} raised RuntimeError: Expected tensor for argument #1 'indices'",
    "exits": r"rank {r} left before this call; last call 1",
    "exits_in_the_exchange": r"rank {r} left before this call; last call 1",
    "killed": r"rank {r} exited or was killed; last call \d, phase \w+",
    "killed_while_others_compute": r"rank {r} exited or was killed",
    "killed_in_the_exchange": r"rank {r} exited or was killed",
    "stopped": r"rank {r} is stopped; last call",
    "stopped_in_the_exchange": r"rank {r} is stopped; last call",
    "first_rank_killed": r"rank {r} (is gone, and the control store with it|exited or was killed)",
    "first_rank_stopped": r"rank {r} is stopped",
    "first_rank_raises": r"rank {r} raised ZeroDivisionError: the drill's own",
    "first_rank_exits": r"rank {r} left before this call; last call 1",
    "first_rank_brings_other_dtype": r"dtype differs \(rank 0: 'torch.bfloat16', rank 1: 'torch.float16'",
    "other_dtype": r"dtype differs \(rank \d: 'torch.float16',.*odd: rank {r}",
    "other_text_length": r"prefix differs .*odd: rank {r}",
    "other_known_shape": r"rows differs .*odd: rank {r}",
    "skipped_call": r"layer differs .*odd: rank {r}",
    "swapped_groups": r"mesh group differs .*odd: rank {r}",
}
GIVEN_UP = dict.fromkeys(
    ("sleeps", "sleeps_in_the_exchange", "sleeps_while_others_do_not_wait", "first_rank_sleeps"),
    r"rank {r} has not arrived within 12 s \(ParallelConfig.stall_timeout\)",
)
"""The same, said once the stall timeout is over."""
_ABSENT = r"rank {r} did not come to the vote before the next request within 12 s"
_BROKEN = r"RAISED \d \w+"
UNWATCHED = {
    **{fault: SAID[fault] for fault in (
        "raises", "raises_in_forward", "one_branch_fails", "other_dtype", "other_text_length", "other_known_shape",
        "skipped_call", "swapped_groups", "first_rank_raises", "first_rank_brings_other_dtype",
    )},
    **dict.fromkeys(("exits", "killed", "stopped", "sleeps", "first_rank_exits", "first_rank_sleeps",
                     "first_rank_killed", "first_rank_stopped"), _ABSENT),
    **dict.fromkeys(("exits_in_the_exchange", "killed_in_the_exchange", "stopped_in_the_exchange",
                     "sleeps_in_the_exchange", "sleeps_while_others_do_not_wait"), _BROKEN),
}  # fmt: skip
"""What every living rank says where nobody watches: votes name who differs, who raised and who is missing once their
timeout is over; inside an exchange the group's own timeout raises, and no rank can be named. Nobody notices a rank that
is killed while the others compute, and a rank may compile no longer than a vote waits."""
NO_ALARM = {"compiles_for_long": 20, "holds_the_interpreter": 8}
"""No fault: how many seconds a rank is silent, or not there, and all end well."""


def faulty_rank(fault: str, *, world_size: int) -> int:
    """The rank that misbehaves."""
    return 0 if fault.startswith("first_rank") else world_size - 1


def living_ranks(fault: str, *, world_size: int, groups: bool) -> list[int]:
    """The ranks that must name it: those of the faulty one's group, and itself where the ranks disagree."""
    faulty = faulty_rank(fault, world_size=world_size)
    members = [r for r in range(world_size) if not groups or (r < world_size // 2) == (faulty < world_size // 2)]
    return members if "differs" in SAID.get(fault, "") else [r for r in members if r != faulty]
