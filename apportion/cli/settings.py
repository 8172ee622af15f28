"""Options of a command from a file and from the environment. What the command line says goes before both, and the
environment before the file:

    port: 8321              in serve.yaml: flags without their dashes
    APPORTION_SERVE_PORT    in the environment: the flag in capitals
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import typer

from apportion.ir.errors import ConfigError

#: options that are no settings: what to print, and where settings come from
_ASIDE = ("--config", "--show-config", "--json", "--help", "--parent")


def environment_of(command: str) -> dict[str, Any]:
    """Settings of a typer command whose options the environment may name: `APPORTION_COMMAND_OPTION`."""
    return {"auto_envvar_prefix": _prefix(command).rstrip("_")}


def take_file(context: typer.Context, path: Path | None) -> Path | None:
    """Callback of an eager `--config`: what the file says stands where command line and environment say nothing.

    Raises ConfigError for a name that is no option, in the file or in the environment, and for what is no value."""
    from apportion.ir.fields import known, load, suggestion

    named = _options(context)
    prefix = _prefix(context.info_name or "")
    names = {prefix + _capitals(name) for name in (*named, "config")}
    for variable in sorted(os.environ):
        if variable.startswith(prefix) and variable not in names:
            raise ConfigError(variable, "(hidden)", "names no option", suggestion(variable, sorted(names)))
    if path is None:
        return None
    data = known(str(path), load(path), named)
    flags = {
        str(parameter.name) for parameter in context.command.params if getattr(parameter, "is_flag", False)
    }
    for name, value in data.items():
        if isinstance(value, bool) and named[name] in flags:
            continue
        if isinstance(value, bool | list | dict) or value is None:
            raise ConfigError(f"{path}.{name}", value, "must be text or a number", f"write `{name}: VALUE`")
    context.default_map = {named[name]: str(value) for name, value in data.items()}
    return path


def effective(context: typer.Context) -> dict[str, dict[str, Any]]:
    """Option -> its value, and where that is from: command line, environment, file, default. Passwords are hidden."""
    found = {}
    for name, parameter in _options(context).items():
        source = context.get_parameter_source(parameter)
        told = {"COMMANDLINE": "command line", "ENVIRONMENT": "environment", "DEFAULT_MAP": "file"}
        value = context.params[parameter]
        found[name] = {
            "value": _hidden(str(value)) if isinstance(value, str | Path) else value,
            "from": told.get(source.name if source else "", "default"),
        }
    return found


def as_file(settings: Mapping[str, Mapping[str, Any]]) -> str:
    """The file that says so; what is not set is a comment."""
    import yaml

    lines = []
    for name, setting in settings.items():
        text = yaml.safe_dump({name: setting["value"]}, width=1000).strip()
        lines.append(f"{text:<40}  # {setting['from']}" if setting["value"] is not None else f"# {name}:")
    return "\n".join(lines)


def _options(context: typer.Context) -> dict[str, str]:
    """Option without dashes -> the command's argument."""
    return {
        flag.lstrip("-"): str(parameter.name)
        for parameter in context.command.params
        for flag in parameter.opts
        if flag.startswith("--") and flag not in _ASIDE
    }


def _prefix(command: str) -> str:
    return f"APPORTION_{_capitals(command)}_"


def _capitals(name: str) -> str:
    return name.upper().replace("-", "_")


def _hidden(text: str) -> str:
    """A URL without its password."""
    password = urlsplit(text).password if "://" in text else None
    return text.replace(f":{password}@", ":***@") if password else text
