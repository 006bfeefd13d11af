"""Answer to `--help` of an example without arguments."""

from argparse import ArgumentParser, RawDescriptionHelpFormatter


def take_no_arguments(documentation: str | None) -> None:
    """Print the example's documentation where `--help` asks for it, and refuse other arguments."""
    ArgumentParser(description=documentation, formatter_class=RawDescriptionHelpFormatter).parse_args()
