"""Parser: the command line's grammar, and its help in parts."""

import argparse
import difflib
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from server.cli.config_file import read_config_file
from server.cli.values import DottedJson

HELP_TEXT = "show the flags used most; or =all, =GROUP, or =FLAG for one flag"


class Parser(argparse.ArgumentParser):
    """An ArgumentParser with vLLM's habits, which tells each mistake in one line.

    Underscores in flags are dashes; a flag with dots sets a part of a JSON value; `--config`
    names a YAML file whose values go over the defaults and under the command line's. Words behind
    a lone "--" are left as they are.

    Attributes:
      common: names of the arguments that the short help shows; all if there are none.
    """

    def __init__(self, *, common: Iterable[str] = (), **options: Any):
        super().__init__(add_help=False, allow_abbrev=False, **options)
        self.common = tuple(common)
        self.add_argument(
            "-h", "--help", action=_HelpAction, nargs="?", metavar="TOPIC", help=HELP_TEXT
        )

    def parse_known_args(self, args=None, namespace=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        """See argparse; words that are not known are an error here."""
        words = sys.argv[1:] if args is None else list(args)
        end = words.index("--") if "--" in words else len(words)
        rewritten = _rewrite(words[:end])
        self._apply_config_file(rewritten)
        found, unknown = super().parse_known_args(rewritten + words[end:], namespace)
        if unknown:
            self._refuse(unknown)
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """End the process with status 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def flag_actions(self) -> dict[str, argparse.Action]:
        """Each flag's action, by all its names; flags without help text are among them."""
        return dict(self._option_string_actions)

    def find(self, name: str) -> argparse.Action | None:
        """The argument of a name: with or without dashes, or with underscores."""
        flag = "--" + name.lstrip("-").replace("_", "-")
        named = [a for a in self._actions if a.dest == name.replace("-", "_")]
        action = self._option_string_actions.get(flag) or next(iter(named), None)
        return self._option_string_actions.get(name) if action is None else action

    def show_help(self, topic: str) -> str:
        """The help of a topic: "" for the short form, "all", a group, or a flag.

        Raises:
          ValueError: there is no such topic; it says which one is close.
        """
        if topic == "all" or (topic == "" and not self.common):
            return self.format_help()
        if topic == "":
            return self._short_help()
        group = _plain(topic)
        for section in self._action_groups:
            if section.title is not None and group in (_plain(section.title), section.title):
                return self._format(f"{section.title}:", section._group_actions)
        action = self.find(topic)
        if action is not None and action.help is not argparse.SUPPRESS:
            return self._format(None, [action])
        if action is not None:
            return f"{action.option_strings[0]} is not supported in this release\n"
        raise ValueError(f"--help={topic} names no flag and no group{self._close_to(topic)}")

    def _short_help(self) -> str:
        actions = [action for name in self.common if (action := self.find(name)) is not None]
        groups = [g.title for g in self._action_groups if g.title and g._group_actions]
        shown = ", ".join(
            title for title in groups if not title.startswith(("options", "positional"))
        )
        return (
            f"{self.format_usage()}\n{self.description}\n\n"
            f"{self._format('flags used most:', actions)}\n"
            f"all flags: {self.prog} --help=all    one flag: {self.prog} --help=FLAG\n"
            f"one group: {self.prog} --help=GROUP, of {shown}\n"
        )

    def _format(self, title: str | None, actions: Sequence[argparse.Action]) -> str:
        formatter = self._get_formatter()
        formatter.start_section(title.removesuffix(":") if title else None)
        formatter.add_arguments(actions)
        formatter.end_section()
        return formatter.format_help()

    def _apply_config_file(self, words: Sequence[str]) -> None:
        if "--config" not in self._option_string_actions:
            return
        for index, word in enumerate(words):
            flag, equals, path = word.partition("=")
            if flag == "--config" and (equals or index + 1 < len(words)):
                path = path if equals else words[index + 1]
                self.set_defaults(**read_config_file(path, self.find, self.flag_actions()))

    def _refuse(self, words: Sequence[str]) -> NoReturn:
        """Tell which word is not known, and which flag it may be meant to be."""
        flag = next((word for word in words if word.startswith("-")), None)
        if flag is None:
            self.error(f"takes no further words; got {' '.join(words)!r}")
        name = flag.partition("=")[0]
        self.error(f"{name} is not a flag of this command{self._close_to(name)}")

    def _close_to(self, name: str) -> str:
        known = [n for n, a in self._option_string_actions.items() if a.help != argparse.SUPPRESS]
        flag = "--" + name.lstrip("-").replace("_", "-")
        close = difflib.get_close_matches(flag, known, n=1)
        return f"; did you mean {close[0]}?" if close else ""


class _HelpAction(argparse.Action):
    """Prints the help of a topic and ends the process."""

    def __call__(self, parser, namespace, values: Any, option_string=None) -> None:
        assert isinstance(parser, Parser)
        try:
            text = parser.show_help(values or "")
        except ValueError as error:
            parser.error(str(error))
        print(text, end="")
        parser.exit()


def _plain(title: str) -> str:
    """A group's name as people may write it: "SchedulerConfig" is "scheduler"."""
    return title.lower().replace("_", " ").replace("-", " ").removesuffix("config").strip()


def _rewrite(words: Sequence[str]) -> list[str]:
    """Dashes for underscores in flags, and JSON for flags with dots."""
    rewritten: list[str] = []
    rest = iter(words)
    for word in rest:
        flag, equals, value = word.partition("=")
        if not flag.startswith("--") or flag == "--":
            rewritten.append(word)
            continue
        base, dot, path = flag.partition(".")
        base = base.replace("_", "-")
        if not dot:
            rewritten.append(base + equals + value)
            continue
        text = value if equals else next(rest, None)
        rewritten.append(base)
        if text is not None:
            rewritten.append(DottedJson(json.dumps(_nested(path.split("."), text))))
    return rewritten


def _nested(keys: Sequence[str], text: str) -> Any:
    """The value of a dotted flag: JSON if it reads as such, text otherwise."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    for key in reversed(keys):
        value = {key: value}
    return value
