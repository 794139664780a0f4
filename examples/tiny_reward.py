"""The demo's reward, an example of `reward.custom`: partial credit for each correct digit, in two forms."""


def digits_in_place(text: str, answer: str, row: dict) -> float:
    """Equal positions ÷ the longer length: against "2413", "24" gets 0.5 and "24135" gets 0.8."""
    return sum(a == b for a, b in zip(text, answer, strict=False)) / max(len(text), len(answer))


def each_digit(text: str, answer: str, row: dict) -> list[tuple[int, int, float]]:
    """The same reward as spans: (start, end, reward) for each character of the text."""
    longest = max(len(text), len(answer))
    return [(i, i + 1, (a == b) / longest) for i, (a, b) in enumerate(zip(text, answer, strict=False))]
