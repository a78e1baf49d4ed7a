"""Which dimensions part good configs from bad ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bo_tuner.report.figures.style import NEUTRAL, base_figure, note_figure
from bo_tuner.space import distributions
from bo_tuner.trial import TrialRecord

if TYPE_CHECKING:
    import plotly.graph_objects as go

__all__ = ["importance_figure", "parameter_importances"]

_TITLE = "Parameter importances"
_LEAST_TRIALS = 8
_LEAST_GOOD = 5
"""PED-ANOVA is steady with at least so many trials in the good group, says Optuna."""
_ROW = 34


def importance_figure(records: Sequence[TrialRecord]) -> go.Figure:
    """Share of every dimension in what parts the best complete trials from the others; says so where that is unknown."""
    import plotly.graph_objects as go

    complete = [record for record in records if record.goal.score(record) is not None]
    if len(complete) < _LEAST_TRIALS:
        return note_figure(_TITLE, f"Needs {_LEAST_TRIALS} complete trials; there are {len(complete)}.")
    shares = parameter_importances(complete)
    if not shares:
        return note_figure(_TITLE, "All complete trials are equally good, or alike in every dimension.")
    names = [name.replace("_", " ") for name in shares]
    figure = base_figure(_TITLE, height=_ROW * len(names) + 130)
    figure.add_trace(
        go.Bar(
            x=[100 * share for share in shares.values()],
            y=names,
            orientation="h",
            marker={"color": NEUTRAL},
            text=[f"{100 * share:.0f} %" for share in shares.values()],
            textposition="auto",
            hoverinfo="skip",
            showlegend=False,
            width=0.62,
        )
    )
    figure.update_xaxes(title={"text": "share, %"}, rangemode="tozero")
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return figure


def parameter_importances(complete: Sequence[TrialRecord]) -> dict[str, float]:
    """Optuna's PED-ANOVA (Watanabe et al. 2023, arXiv:2304.10255) on complete trials; the shares add up to 1, largest first.

    It asks how differently a dimension is spread among the best tenth (or the best five, at most half) by score and among all.
    Nothing is drawn at random. Empty where nothing parts them.
    """
    import optuna

    scores = [record.goal.score(record) or 0.0 for record in complete]
    falling = sorted(scores, reverse=True)
    n_good = max(len(scores) // 10, min(_LEAST_GOOD, len(scores) // 2))
    rows = [record.config.params() for record in complete]
    varied = [name for name in rows[0] if len({row[name] for row in rows}) > 1]
    if not varied or falling[n_good - 1] <= falling[-1]:  # the worst counts as good: there is one group
        return {}
    space = distributions([record.config for record in complete])
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # a study in memory is no news
    study = optuna.create_study(
        storage=optuna.storages.InMemoryStorage(), sampler=optuna.samplers.RandomSampler(seed=0), direction="maximize"
    )
    study.add_trials(
        [
            optuna.trial.create_trial(params=row, distributions=space, value=score)
            for row, score in zip(rows, scores, strict=True)
        ]
    )
    evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=n_good / len(scores))
    return optuna.importance.get_param_importances(study, evaluator=evaluator, params=varied)
