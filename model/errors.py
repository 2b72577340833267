"""The one error class that means "the user must change something"."""


class BadInput(ValueError):
    """A user error found before work starts.

    The message says what is wrong, where, and the remedy. The command line prints it alone, without a traceback, and
    exits with code 2; any other exception is a fault of ours and exits with code 1.
    """
