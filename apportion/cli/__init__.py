"""The command line. Every command has `--json`: one JSON object on stdout, everything else on stderr.

    exit 0  done, and every check passed
    exit 1  a check failed: a plan breaks a rule, two plans differ, losses differ
    exit 2  no result: wrong input, a request that cannot be served, a package not installed, no answer from a server
    exit 130  interrupted

Heavy imports (numpy, torch) happen inside the commands, so that `--help` is instant.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import Annotated

import typer
from typer import Option

from apportion.cli import output
from apportion.cli.commands import (
    bench,
    compare,
    conformance,
    doctor,
    forecast,
    installation,
    plans,
    precompute,
    profile,
    recipes,
    report,
    serve,
    simulate,
    store,
)
from apportion.cli.output import BAD_INPUT, FAILED, INTERRUPTED, OK, drop_stdout, note, refuse
from apportion.ir.errors import ApportionError, VerifyError

__all__ = ["BAD_INPUT", "FAILED", "INTERRUPTED", "OK", "app", "main"]

app = typer.Typer(
    help="Plans context-parallel attention: which rank holds which tokens, computes which piece of "
    "attention, and moves which bytes.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, and every check passed; 1 a check failed; 2 no result: wrong input, a missing package, "
    "a server that does not answer; 130 interrupted.",
)
#: heading of the help -> its commands, in order
GROUPS = {
    "Plan": (plans.plan, compare.compare, forecast.forecast, precompute.precompute),
    "Look at plans": (plans.show, report.report, simulate.simulate, plans.diff, plans.verify),
    "Measure": (profile.profile, bench.app, installation.selftest, doctor.doctor, installation.demo),
    "Serve": (serve.serve, store.app),
    "Extend": (recipes.recipes, recipes.solvers, conformance.conformance),
}
for heading, commands in GROUPS.items():
    for item in commands:
        if isinstance(item, typer.Typer):
            app.add_typer(item, rich_help_panel=heading)
            continue
        variables = {"auto_envvar_prefix": "APPORTION_SERVE"} if item is serve.serve else None
        app.command(rich_help_panel=heading, context_settings=variables)(item)


@app.callback()
def common(
    quiet: Annotated[
        bool, Option("--quiet", "-q", help="Print nothing but errors on stderr: no progress, no notes.")
    ] = False,
    version: Annotated[
        bool, Option("--version", help="Print versions.", is_eager=True, callback=installation.print_versions)
    ] = False,
) -> None:
    output.quiet = quiet


# click's UsageError: from click, or from the copy of it inside typer
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def main(args: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: entry point of the console script `apportion`."""
    args = sys.argv[1:] if args is None else list(args)
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: note(f"warning: {message}")
        return _run(args)


def _run(args: list[str]) -> int:
    try:
        code = int(app(args=args, prog_name="apportion", standalone_mode=False) or OK)
        print(end="", flush=True)
        return code
    except UsageError as error:
        return refuse(error.format_message(), error, "--json" in args)  # type: ignore[attr-defined]
    except VerifyError as error:
        return refuse(str(error), error, "--json" in args, FAILED)
    except ApportionError as error:
        return refuse(_option_message(error, args), error, "--json" in args)
    except BrokenPipeError:  # the reader of a pipe has closed it, as in `apportion show P.plan | head`
        drop_stdout()
        return OK
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        message = reason if error.filename is None else f"{error.filename}: {reason}"
        return refuse(message, error, "--json" in args)
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED


def _option_message(error: ApportionError, args: list[str]) -> str:
    """The error's message, with the option's name in place of the library's argument if the option was given."""
    field = str(getattr(error, "field", ""))
    option = f"--{field.replace('_', '-')}"
    is_given = any(word.partition("=")[0] == option for word in args)
    return option + str(error).removeprefix(field) if is_given else str(error)
