"""Judge for cuda_accuracy.py whether the engine is close enough to its reference."""

from dataclasses import dataclass
from typing import Any

MOST_APART, ERRORS, MOST_DB = 0.02, 3, 1.0  # points of top-1, standard errors, dB: see `wrong`
WIDER_DB = 3.0  # for an engine with a rounding that its reference lacks: twice the noise


@dataclass(frozen=True)
class Judged:
    """Scores of the reference and of the engine against the float model, and of the engine against the reference."""

    before: Any
    engine: Any
    pair: Any


def judged(float32, before, engine, batches, device) -> Judged:
    """Score all three on the same pictures, in one pass."""
    from swin_quant.score.metrics import Sums, scores_of, tally

    pair = Sums()

    def watch(batch, answers) -> None:
        pair.add(answers["engine"].logits, batch.labels.to(device), answers["before"].logits)

    sums = tally({"float32": float32, "before": before, "engine": engine}, batches, device, watch=watch)
    found = [*sums.values(), pair]
    _, *rest = scores_of("abcd", [list(vars(one).values()) for one in found]).values()
    return Judged(*rest)


def wrong(found: Judged, most_db: float = MOST_DB) -> str:
    """The fault in the figures, or "".

    Roundings on ties amplify any change of order, so pictures near a class border flip either way: more than three
    standard errors is no chance. The noise that both add to the float logits is a mean over all logits, and a sharper
    test.
    """
    pair = found.pair
    most = max(MOST_APART, 100 / pair.pictures, ERRORS * pair.delta_acc1_se)  # one picture is the least difference
    if abs(pair.delta_acc1) > most + 1e-9:
        return f"top-1 differs by {pair.delta_acc1:+.2f} points: {most:.2f} at most"
    if None not in (found.before.sqnr_db, found.engine.sqnr_db):
        less = found.before.sqnr_db - found.engine.sqnr_db
        if less > most_db:
            return f"SQNR to the float model is {less:.1f} dB less: {most_db:.0f} at most"
    return ""
