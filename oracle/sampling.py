"""Whether sampled tokens look drawn from the probabilities that the model gives them.

Each test is a bet at fair odds. An alternative, such as "its temperature is 0.9 times as high", gives a token the
probability q where the model gives p. A stake on it is multiplied by q / p, whose mean is 1 if the token is drawn from
p. So the stakes of a healthy run grow a million times with a chance of one in a million, however long it is. A stake
grows for long only if its alternative is nearer to the truth than the model is, so rounding wins no bet.
"""

import math

import torch

LIMIT = math.log(1e6)  # of the mean of all stakes, in nats
TEMPERATURES = (0.8, 0.9, 1.1, 1.25)  # times the one of the configuration
MASSES = (0.8, 0.9, 0.95, 0.99)  # of the likeliest tokens; a bet says that beyond them are a fifth of what should be
LEANS = (-0.5, 0.5)  # slopes of the density of places from -1 to 1
FIRST = (2, 8, 32)  # tokens of a turn of which none ends it, says a bet
ALTERNATIVES = (
    *(f"its temperature is {factor} times as high" for factor in TEMPERATURES),
    *(f"it takes the likeliest tokens alone, of probability {mass}" for mass in MASSES),
    *(f"it prefers tokens of {'high' if lean > 0 else 'low'} ids" for lean in LEANS),
    *(f"none of the first {first} tokens of a turn ends it" for first in FIRST),
    "an answer has the random numbers of the one before it in its group", "a group has those of the one before it",
    "a group has those of its number in the step before", "answers of a group are copies",
)  # fmt: skip
KEPT = 0.05  # of a stake that is not risked, where one token could lose it all
RARE = math.log(0.01)  # log-prob of answers that bets on copies are about
PLACES = 256  # tokens of an answer, from its first, that are compared with those of another
CHUNK = 2**20  # log-probs that are looked at together
NONE = torch.zeros(0)  # of an answer that is not there


@torch.no_grad()
def look(logps, tokens, ends):
    """What the bets need to know of each token, [3 + temperatures, tokens], given log-probs [tokens, vocabulary].

    The probability of the tokens with lower ids, of likelier ones, and of the `ends`; the logarithm of the sum of all
    probabilities to the power of 1 / each temperature.
    """
    ids = torch.arange(logps.shape[1], device=logps.device)
    targets = torch.as_tensor(tokens, device=logps.device)
    size = max(1, CHUNK // logps.shape[1])
    found = []
    for logp, target in zip(logps.split(size), targets.split(size), strict=True):
        p = logp.exp()
        lower = torch.where(ids < target[:, None], p, 0).sum(1)
        likelier = torch.where(logp > logp.gather(1, target[:, None]), p, 0).sum(1)
        sums = [(logp / factor).logsumexp(1) for factor in TEMPERATURES]
        found.append(torch.stack([lower, likelier, p[:, sorted(ends)].sum(1), *sums]))
    return torch.cat(found, 1).cpu()


class Bets:
    """The stakes of a run, or of an evaluation, on each alternative; at first 1 each."""

    def __init__(self):
        self.stakes = torch.zeros(len(ALTERNATIVES), dtype=torch.float64)  # their logarithms
        self.before = {}  # (group, number of the answer in it) → places of its tokens, in the step before
        self.generator = torch.Generator().manual_seed(0)

    def add(self, answers, ends):
        """Bet on the tokens of a step's answers (trainer.Answer, in the order of their groups)."""
        places = {}
        rare = {}  # group → token ids of its rare answers so far
        before = None  # the group before this one
        for a in answers:
            group = a.row["group"]
            if group not in rare:
                before = next(reversed(rare), None)
                rare[group] = []
                number = 0

            # Where the tokens are among all: uniform from -1 to 1, with a random part of their own probability.
            own = a.before.double()
            own = torch.where(own > -1e4, own, 0)  # a token outside of its nucleus is judged elsewhere
            lower, likelier, p_end, *sums = a.seen.double()
            part = own.exp() * torch.rand(len(own), generator=self.generator)
            place = (2 * (lower + part) - 1).clamp(-1, 1)
            others = [
                places.get((group, number - 1), NONE), places.get((before, number), NONE),
                self.before.get((group, number), NONE),
            ]  # fmt: skip
            places[group, number] = place[:PLACES]
            number += 1

            odds = [own / factor - total - own for factor, total in zip(TEMPERATURES, sums, strict=True)]
            odds += [torch.where(likelier + part < mass, 0.8 / mass + 0.2, 0.2).log() for mass in MASSES]
            odds += [(1 + lean * place).log() for lean in LEANS]
            odds += [first_odds(a, p_end, ends, first) for first in FIRST]
            odds += [neighbour_odds(place, other) for other in others]
            odds.append(copy_odds(a.row["response_ids"], own.sum(), rare[group]))
            self.stakes += torch.stack([each.sum() for each in odds])
            if own.sum() < RARE:
                rare[group].append(a.row["response_ids"])
        self.before = places

    def won(self):
        """The alternative that won, with its odds, in words; empty while the stakes are what chance makes of them."""
        if self.stakes.logsumexp(0) - math.log(len(self.stakes)) < LIMIT:
            return ""
        best = int(self.stakes.argmax())
        return f"the answers are 1e{self.stakes[best] / math.log(10):.0f} times as likely if {ALTERNATIVES[best]}"


def first_odds(a, p_end, ends, first):
    """The log-odds of an answer if none of the `first` tokens of each turn may be an end token."""
    is_end = torch.tensor([a.row["response_ids"][place] in ends for place in a.sampled])
    turn = torch.cat([torch.arange(length) for length in a.row["turns"][::2]])
    chosen = torch.where(is_end, 0, (1 - KEPT) / (1 - p_end).clamp(min=1e-6)) + KEPT
    return torch.where(turn < first, chosen, 1).log()


def neighbour_odds(place, other):
    """The log-odds of the places of an answer's tokens if they are near those of another answer."""
    size = min(len(place), len(other))
    return (1 + 0.5 * place[:size] * other[:size]).log()


def copy_odds(ids, logp, rare):
    """The log-odds of an answer of this log-prob if one in ten is one of the rare answers before it in its group."""
    if not rare:
        return NONE
    copied = torch.tensor(0.1 * rare.count(ids) / len(rare)).log() - logp
    return copied.logaddexp(torch.tensor(math.log(0.9)))
