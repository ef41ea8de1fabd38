"""The one exception that stands for a mistake of the person at the keyboard."""


class UserError(Exception):
    """A mistake of the user: one sentence that says what is wrong, with which value, and what to do.

    Raised before work starts wherever that is possible. The step programs print it as ``error: …`` and exit with
    code 2; nothing else in the project is caught and turned into a message.
    """
