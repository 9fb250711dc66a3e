"""What a report says of scores in general, what they establish and what they do not; and how it
writes numbers.
"""

from __future__ import annotations

TRUST = (
    "A score says how much a training image and a generated image pull at the model in the same "
    "way, by the method named under Settings. An image with a high score is a lead: look at it, "
    "and if the answer matters, remove it with others like it, train again and see whether the "
    "generated image changes.",
    "A score does not establish that anything was copied, that the model would not have made the "
    "image without that training image, or whose rights are concerned. The least influential "
    "images are those with the lowest scores; nothing says that they did harm. Images outside this "
    "training set were not looked at.",
    "Scores of different generated images are not comparable, and standard deviations are no odds: "
    "scores are skewed, so that some image is always several deviations above the mean. Compare a "
    "hit with the rest of its own histogram, whose bars grow with the logarithm of what they "
    "count.",
)
APART = (
    "Hits “stand apart” where the step from the last of them to the next is larger than chance "
    "makes among the best of many scores, at 5 % for each generated image: of twenty images for "
    "which nothing stands apart, about one looks as if something did. It is taken that the tail of "
    "the scores falls off exponentially. The 16 scores that come after the hits are looked at, too."
)
STABLE = (
    "A score is a mean over draws of noise. The even and the odd draws alone would have given tops "
    "that share {0} of their images, in the median over the generated images. That tells noise of "
    "the measurement from its result; a model trained again with another seed may differ by more."
)
ALIKE = "All training images score the same: nothing was found."
UNKNOWN = (
    "Not every training image was scored exactly, so it is not known how far above the rest these "
    "hits are."
)


def deviations(number: float) -> str:
    """Standard deviations from the mean."""
    sign = "+" if number >= 0 else "\u2212"  # a minus as long as the plus is wide
    return f"{sign}{abs(number):.1f} sd"


def place(percentile: float) -> str:
    """Of 100; the whole of it only where all others are below."""
    if percentile == 100:
        return "100"
    digits = next(digits for digits in range(1, 9) if round(percentile, digits) < 100)
    return f"{percentile:.{digits}f}"


def percent(value: float) -> str:
    """Of 100; all and nothing only where it is."""
    shown = f"{value:.1f}" if value < 10 or value > 99 else f"{value:.0f}"
    if float(shown) == 100 and value < 100:
        shown = "99.9"
    return f"{shown.removesuffix('.0')} %"
