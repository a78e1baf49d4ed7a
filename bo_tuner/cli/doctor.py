"""`bo-tuner doctor`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Annotated

import typer

from bo_tuner.cli.options import AsJson, Debug, Storage, print_json
from bo_tuner.doctor import Finding, Status, examine
from bo_tuner.text import count
from bo_tuner.workload import check_choice

__all__ = ["doctor"]

_COLOURS = {Status.OK: typer.colors.GREEN, Status.WARN: typer.colors.YELLOW, Status.FAIL: typer.colors.RED}
_NAME_WIDTH = len("disk: compiled ops")
_INDENT = " " * (len("fail") + 2 + _NAME_WIDTH + 2)


def doctor(
    storage: Storage = None,
    ranks: Annotated[
        int | None,
        typer.Option(help="Ranks that must meet.", min=1, show_default="all visible GPUs, or 2 CPU ranks"),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Look whether this machine is fit for tuning.

    Each problem comes with what mends it. Exits 1 when something must be mended before trials can run.
    """
    check_choice("--device", device, ("auto", "cpu", "cuda"))

    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    findings: list[Finding] = []
    for finding in examine(device=device, n_ranks=ranks, storage=storage, tell=tell, debug=debug):
        findings.append(finding)
        if not as_json:
            typer.echo(_line(finding))  # leaves the colours out where they cannot be shown
    has_failed = any(finding.status is Status.FAIL for finding in findings)
    if as_json:
        print_json({"is_fit": not has_failed, "findings": [finding.to_dict() for finding in findings]})
    else:
        print(_verdict(findings))
    if has_failed:
        raise typer.Exit(1)


def _line(finding: Finding) -> str:
    """One line, and beneath it the mend and what processes printed."""
    status = typer.style(f"{finding.status.value:<4}", fg=_COLOURS[finding.status])
    lines = [f"{status}  {finding.name:<{_NAME_WIDTH}}  {finding.found}"]
    if finding.mend:
        lines.append(f"{_INDENT}-> {finding.mend}")
    lines += [f"{_INDENT}{line}" for line in finding.log_tail.splitlines()]
    return "\n".join(lines)


def _verdict(findings: Iterable[Finding]) -> str:
    statuses = [finding.status for finding in findings]
    n_failed, n_warned = statuses.count(Status.FAIL), statuses.count(Status.WARN)
    parts = [count(n, noun) for n, noun in ((n_failed, "problem"), (n_warned, "warning")) if n]
    return ", ".join(parts) or "this machine is fit for tuning"
