"""The demo's reward, an example of `reward.custom`: partial credit for each correct digit, in two forms."""


def digits_in_place(text: str, answer: str, row: dict) -> float:
    """Equal positions ÷ the longer length: against "2413", "24" gets 0.5 and "24135" gets 0.8."""
    return sum(a == b for a, b in zip(text, answer, strict=False)) / max(len(text), len(answer))


def each_digit(text: str, answer: str, row: dict, response_ids: list[int]) -> list[float]:
    """The same reward for each token of the answer: a token is a character here, and the end token has none."""
    longest = max(len(text), len(answer))
    rewards = [(a == b) / longest for a, b in zip(text, answer, strict=False)]
    return rewards + [0.0] * (len(response_ids) - len(rewards))
