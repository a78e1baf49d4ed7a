"""Files that `export` hands over; train.py is a program of its own and is never imported here."""

__all__: list[str] = []
