"""The one kind of error that is the user's to mend."""


class UserError(ValueError):
    """A mistake in what was asked for: the message says what was wrong and what to type instead.

    The commands print it without a traceback; a traceback is kept for mistakes of ours.
    """
