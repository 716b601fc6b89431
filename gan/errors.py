"""The one kind of error that is the user's to mend."""


class UserError(ValueError):
    """A mistake in what was asked for: the message says what was wrong and what to type instead.

    The commands print it without a traceback; a traceback is kept for mistakes of ours.
    """

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the message alone, too."""
        return [f"error: {self}"]
