"""What to expect before measuring."""

__all__: list[str] = []
