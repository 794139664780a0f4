"""The demo's reward, an example of `reward.custom`: partial credit for each digit in its place, in two ways."""


def digits_in_place(text: str, answer: str, row: dict) -> float:
    """Share of positions that agree, over the longer of the two: "24" against "2413" is 0.5, "24135" is 0.8."""
    return sum(a == b for a, b in zip(text, answer, strict=False)) / max(len(text), len(answer))


def each_digit(text: str, answer: str, row: dict) -> list[tuple[int, int, float]]:
    """The same share, digit by digit: each character of the text is a span with its own part of it."""
    longest = max(len(text), len(answer))
    return [(i, i + 1, (a == b) / longest) for i, (a, b) in enumerate(zip(text, answer, strict=False))]
