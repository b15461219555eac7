"""The closed world of the pocket model: 576 captions, their attributes, words and held-out split.

Every clip shows one or two flat shapes that move in a straight line over a plain background. A caption
names six attributes and nothing else, so a generated clip can be judged without a person:
`models.pocket.analyse` reads the same six attributes back. The orders below are part of the checkpoint:
`VOCABULARY` gives the token ids, and the positions of colour, shape and direction define which captions
were never trained.
"""

import itertools
from dataclasses import astuple, dataclass

CLIP_FRAMES = 61
CLIP_PIXELS = 64

COUNTS = ("a", "two")
SIZES = ("small", "large")
COLOURS = {
    "red": (0.92, 0.18, 0.18),
    "green": (0.16, 0.80, 0.25),
    "blue": (0.20, 0.35, 0.97),
    "yellow": (0.95, 0.88, 0.20),
    "purple": (0.75, 0.22, 0.88),
    "cyan": (0.20, 0.85, 0.90),
}
SHAPES = ("circle", "square", "triangle")
DIRECTIONS = ("left", "right", "up", "down")
SPEEDS = ("slowly", "fast")

SPECIAL_TOKENS = ("<pad>", "<eos>", "<|vision_start|>")
VOCABULARY = (
    *SPECIAL_TOKENS,
    *COUNTS,
    *SIZES,
    *COLOURS,
    *SHAPES,
    *(shape + "s" for shape in SHAPES),
    "moving",
    *DIRECTIONS,
    *SPEEDS,
)


@dataclass(frozen=True, slots=True)
class Attributes:
    """What one clip shows; each field holds one word of the constant of the same name above."""

    count: str
    size: str
    colour: str
    shape: str
    direction: str
    speed: str


def caption(attributes: Attributes) -> str:
    """Write the caption of a clip, for example "two small red circles moving left slowly".

    Raises ValueError if a value lies outside the grammar: the tokenizer would drop such a word silently.
    """
    if attributes not in ALL_ATTRIBUTES:
        raise ValueError(f"{attributes} is not one of the 576 pocket captions; see models.pocket.captions.")
    count, size, colour, shape, direction, speed = astuple(attributes)
    plural = "s" if count == "two" else ""
    return f"{count} {size} {colour} {shape}{plural} moving {direction} {speed}"


def is_held_out(attributes: Attributes) -> bool:
    """Tell whether this caption was kept out of training.

    12 of the 72 colour x shape x direction triplets are held out, in every count, size and speed: each
    colour twice, each shape four times, each direction two or four times. Every pair of words was trained,
    these triplets never.
    """
    colour = tuple(COLOURS).index(attributes.colour)
    shape = SHAPES.index(attributes.shape)
    direction = DIRECTIONS.index(attributes.direction)
    return colour % 3 == shape and (direction - colour - colour // 3) % 2 == 0


ALL_ATTRIBUTES = tuple(
    Attributes(*values) for values in itertools.product(COUNTS, SIZES, COLOURS, SHAPES, DIRECTIONS, SPEEDS)
)
HELD_OUT = tuple(attributes for attributes in ALL_ATTRIBUTES if is_held_out(attributes))
TRAINED = tuple(attributes for attributes in ALL_ATTRIBUTES if not is_held_out(attributes))
