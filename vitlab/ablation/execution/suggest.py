"""Candidates of Optuna's tree-structured Parzen estimator (Bergstra et al. 2011); alone, as Optuna is optional."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitlab.ablation.execution.identity import json_digest
from vitlab.ablation.file.tune import Range, Tune
from vitlab.errors import UsageError
from vitlab.runs.directory import RunDir

Past = Sequence[tuple[Mapping[str, Any], float, int]]  # values, score (NaN: it diverged), epoch if it was stopped
AT_RANDOM = 4  # candidates before the first that learns from others, the same for all arms


def suggestion(tune: Tune, sign: int, past: Past, folder: Path) -> dict[str, Any]:
    """Return the next candidate of an arm; it depends on the earlier ones, and is stored in ``folder``.

    Raises:
        UsageError: Optuna is not installed, and no suggestion is stored.
    """
    space = {key: vars(v) if isinstance(v, Range) else list(v) for key, v in tune.space.items()}
    name = f"try{len(past)}-{json_digest([space, sign, [list(p) for p in past]])}.json"
    if not (folder / name).is_file():
        RunDir(folder).write(name, _suggest(tune, sign, past))
    return RunDir(folder).read(name)


def _suggest(tune: Tune, sign: int, past: Past) -> dict[str, Any]:
    try:
        import optuna
    except ImportError as error:
        raise UsageError("`tune.search: tpe` needs Optuna: pip install 'vitlab[tune]'") from error
    from optuna.distributions import CategoricalDistribution, FloatDistribution
    from optuna.trial import TrialState, create_trial

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    choices = {k: list(v) for k, v in tune.space.items() if not isinstance(v, Range)}
    space: dict[str, Any] = {k: CategoricalDistribution(range(len(v))) for k, v in choices.items()}
    space |= {k: FloatDistribution(r.low, r.high, log=r.log) for k, r in tune.space.items() if isinstance(r, Range)}
    for again in range(20):  # a small space may yield values that were tried already
        sampler = optuna.samplers.TPESampler(seed=1000 * again + len(past), n_startup_trials=AT_RANDOM)
        study = optuna.create_study(direction="maximize", sampler=sampler)
        for values, score, stopped in past:
            params = {k: choices[k].index(v) if k in choices else v for k, v in values.items()}
            given: dict[str, Any] = {"value": sign * score}
            if stopped or score != score:
                seen = {stopped: sign * score} if score == score else {}
                given = {"state": TrialState.PRUNED, "intermediate_values": seen}
            study.add_trial(create_trial(params=params, distributions=space, **given))
        asked = study.ask(space).params
        found = {k: choices[k][v] if k in choices else tune.space[k].rounded(v) for k, v in asked.items()}  # type: ignore[union-attr]
        if found not in [dict(values) for values, _, _ in past]:
            break
    return {key: found[key] for key in tune.space}
