"""Answers: what the rows say to the questions that a reader of the paper has, in figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from relprop.reproduction.claims import CLAIMS
from relprop.reproduction.conservation import CONVENTIONAL, Sums
from relprop.reproduction.tables import PUBLISHED, TIE_SAFE, Values, shown, values
from relprop.study import Row, estimate

_OURS, _RAW = "released+hq-released", "released"
_BOTH = {PUBLISHED: "as published", TIE_SAFE: "tie-safe"}


def answer(rows: Iterable[Row], sums: Sequence[Sums]) -> str:
    """A list, an item a question."""
    found = values(rows)
    return "\n".join(
        f"{number}. **{question}** {reply}"
        for number, (question, reply) in enumerate(
            [
                ("Does the published ID of the method reproduce under the published protocol?", _reproduces(found)),
                ("How much of Heat Quantization's gain remains when ties cannot help?", _quantisation(found)),
                ("How much do gradient baselines gain when all channels count?", _channels(found)),
                ("The true class or the predicted one: what changes?", _classes(found)),
                ("Which ablation wins, and is the difference larger than its interval?", _ablations(found)),
                ("Does the mixture's 0.644 survive?", _mixture(found, sums)),
                ("Which stand-in for the max pool?", _against(found, "paper", "pools")),
                ("Batch norms passed through or folded?", _against(found, "paper", "norms")),
                ("How exact is conservation?", _exact(sums)),
            ],
            1,
        )
    )


def _score(found: Values, method: str, protocol: str, name: str = "score") -> str:
    return shown(found.get((method, protocol, name), {})) or "not measured"


def _paired(found: Values, method: str, reference: str, protocol: str, names: tuple[str, str] = ("score",) * 2) -> str:
    """The mean paired difference of two methods, or of two scores, with the number of images where they are fewer."""
    mine, theirs = (found.get((m, protocol, n), {}) for m, n in zip((method, reference), names, strict=True))
    shared = sorted(mine.keys() & theirs.keys())
    if not shared:
        return "not measured"
    e = estimate([mine[i] - theirs[i] for i in shared])
    clear = "" if e.low > 0 or e.high < 0 else ", which may be zero"
    fewer = "" if len(shared) == len(theirs) else f" on {len(shared)} images"
    return f"{e.mean:+.3f} [{e.low:+.3f}, {e.high:+.3f}]{fewer}{clear}"


def _reproduces(found: Values) -> str:
    n = len(found.get((_OURS, PUBLISHED, "score"), {}))
    return f"The paper has 0.545; here it is {_score(found, _OURS, PUBLISHED)} on {n} images (Grad-CAM: 0.371 and " + (
        f"{_score(found, 'grad-cam', PUBLISHED)})."
    )


def _quantisation(found: Values) -> str:
    parts = [f"{_paired(found, _OURS, _RAW, p)} {how}" for p, how in _BOTH.items()]
    noise = [f"{_score(found, 'random+hq-released', p)} {how}" for p, how in _BOTH.items()]
    return f"Quantising changes the ID of (iv) by {' and by '.join(parts)}. A quantised random map scores " + (
        f"{' and '.join(noise)}."
    )


def _channels(found: Values) -> str:
    names = {line.method: line.label for line in CLAIMS["channels"].lines if not line.method.endswith("+sum")}
    parts = [f"{label} {_paired(found, f'{m}+sum', m, PUBLISHED)}" for m, label in names.items()]
    return f"As published, against the first channel alone: {'; '.join(parts)}."


def _classes(found: Values) -> str:
    parts = []
    for method in (_OURS, _RAW, "grad-cam"):
        change = _paired(found, method, method, PUBLISHED, ("score of the explained class", "score"))
        parts.append(f"{method} {change}")
    return f"Scoring the explained class instead of the true one changes the published ID by: {'; '.join(parts)}."


def _ablations(found: Values) -> str:
    parts = []
    for suffix, how in (("+hq-released", "quantised"), ("", "raw")):
        for protocol, name in _BOTH.items():
            pairs = [f"({m}) {_paired(found, m + suffix, f'released{suffix}', protocol)}" for m in ("i", "ii", "iii")]
            parts.append(f"{how}, {name}: {'; '.join(pairs)}")
    return "Against (iv), image by image: " + ". ".join(f"{part[0].upper()}{part[1:]}" for part in parts) + "."


def _mixture(found: Values, sums: Sequence[Sums]) -> str:
    method = "released-mixture"
    sizes = [abs(row["input"]) / row["probability"] for row in sums if row["method"] == method]
    return (
        f"Its ID is {_score(found, f'{method}+hq-released', PUBLISHED)} as published and "
        f"{_score(found, f'{method}+hq-released', TIE_SAFE)} tie-safe. Its sums at the input are "
        f"{min(sizes):.0e} to {max(sizes):.0e} times what it starts from. Stabilised and raw, it scores "
        f"{_score(found, 'mixture', TIE_SAFE)} tie-safe."
    )


def _against(found: Values, reference: str, claim: str) -> str:
    lines = [line for line in CLAIMS[claim].lines if line.method != reference]
    label = next(line.label for line in CLAIMS[claim].lines if line.method == reference)
    parts = [f"{line.label} {_paired(found, line.method, reference, TIE_SAFE)}" for line in lines]
    return f"Tie-safe, *{label}* has {_score(found, reference, TIE_SAFE)}; against it: {'; '.join(parts)}."


def _exact(sums: Sequence[Sums]) -> str:
    parts = []
    for method in ("paper", "released", "epsilon", CONVENTIONAL):
        off = [abs(row["input"] - row["probability"]) / row["probability"] for row in sums if row["method"] == method]
        parts.append(f"`{method}` {max(off):.1e}")
    return f"The largest |sum at the input - p| / p over {len(sums) // 6} images: {', '.join(parts)}."
