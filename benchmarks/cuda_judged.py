"""For cuda_accuracy.py: how near the engine is to what it stands for, and whether that is near enough."""

from dataclasses import dataclass
from typing import Any

MOST_APART, ERRORS, MOST_DB = 0.02, 3, 1.0  # points of top-1, standard errors, dB: see `wrong`


@dataclass(frozen=True)
class Judged:
    """Scores of what an engine stands for and of the engine, beside the float model; and of the engine beside that."""

    before: Any
    engine: Any
    pair: Any


def judged(float32, before, engine, batches, device) -> Judged:
    """All on the same pictures, which pass once."""
    from swin_quant.score.metrics import Sums, scores_of, tally

    pair = Sums()

    def watch(batch, answers) -> None:
        pair.add(answers["engine"].logits, batch.labels.to(device), answers["before"].logits)

    sums = tally({"float32": float32, "before": before, "engine": engine}, batches, device, watch=watch)
    found = [*sums.values(), pair]
    _, *rest = scores_of("abcd", [list(vars(one).values()) for one in found]).values()
    return Judged(*rest)


def wrong(found: Judged) -> str:
    """What is, if anything.

    Roundings on ties amplify whatever is in another order, so that pictures near a border flip either way: more than
    three standard errors is no chance. What the two add to the float logits is a mean over all of them, and sharper.
    """
    pair = found.pair
    most = max(
        MOST_APART, 100 / pair.pictures, ERRORS * pair.delta_acc1_se
    )  # one picture is the least that can be told
    if abs(pair.delta_acc1) > most + 1e-9:
        return f"top-1 differs by {pair.delta_acc1:+.2f} points: {most:.2f} at most"
    if None not in (found.before.sqnr_db, found.engine.sqnr_db):
        less = found.before.sqnr_db - found.engine.sqnr_db
        if less > MOST_DB:
            return f"SQNR to the float model is {less:.1f} dB less: {MOST_DB:.0f} at most"
    return ""
