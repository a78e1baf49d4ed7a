"""What gets measured: the objective protocol and its implementations."""

from bo_tuner.objectives.base import EventSink, Objective, TrialEvent, ignore_events

__all__ = ["EventSink", "Objective", "TrialEvent", "ignore_events"]
