"""Pipeline schedules as pure functions, and their simulator."""

__all__: list[str] = []
