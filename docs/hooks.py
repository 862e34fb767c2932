"""What the site adds to MkDocs: see `hooks` in mkdocs.yml.

- Some files beside docs/ are pages, and so is the reference of the command line.
- Links are written for a reader of the repository. Those to such a file lead to its page; those to
  any other file of the repository lead to it where `repo_url` is set, and are plain text elsewhere.
- `folder/` in the navigation stands for the pages of docs/folder.
"""

from __future__ import annotations

import inspect
import logging
import os.path
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {  # a file of the repository: its page
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "patches/README.md": "patches.md",
    "configs/tuned/README.md": "plans.md",
}
FILES = {page: file for file, page in PAGES.items()}
LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?!\w+:|#)(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
log = logging.getLogger("mkdocs.hooks")


def on_config(config: Any) -> None:
    config.nav = [expanded for entry in config.nav for expanded in _expanded(entry)]


def _expanded(entry: Any) -> list[Any]:
    if isinstance(entry, str):
        folder = sorted((DOCS / entry).glob("*.md")) if entry.endswith("/") else None
        return [entry] if folder is None else [str(page.relative_to(DOCS)) for page in folder]
    (title, below), *_ = entry.items()
    if isinstance(below, str) and not below.endswith("/"):
        return [entry]
    entries = below if isinstance(below, list) else [below]
    return [{title: [page for one in entries for page in _expanded(one)]}]


def on_files(files: Any, config: Any) -> None:
    for file, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / file).read_text()))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    if page.file.src_uri == "reference/cli.md":
        markdown += _command_line()
    source = FILES.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    return LINK.sub(lambda link: _rewritten(link, source, page.file, config, files), markdown)


def _rewritten(link: re.Match[str], source: str, of: File, config: Any, files: Any) -> str:
    path = os.path.normpath(os.path.join(os.path.dirname(source), link["path"]))
    uri = PAGES.get(path, os.path.relpath(path, "docs"))
    if files.get_file_from_path(uri):
        target = os.path.relpath(uri, os.path.dirname(of.src_uri)) + (link["anchor"] or "")
        return f"[{link['text']}]({target})"
    if not (ROOT / path).exists():
        log.warning("%s links to %s, which does not exist", source, path)
    if not config.repo_url:
        return link["text"]
    return f"[{link['text']}]({config.repo_url.rstrip('/')}/blob/HEAD/{path})"


def _command_line() -> str:
    """Every command with its arguments and options, from the typer app."""
    sys.path.insert(0, str(ROOT))
    import typer

    from flux_megatron import doctor
    from flux_megatron.cli import app

    root = typer.main.get_command(app)
    lines = "\n".join(_command(root, "flux-megatron", typer.Context(root)))
    return f"{lines}\n\n```\n{doctor.parser().format_help()}```\n"


def _command(command: Any, name: str, context: Any) -> Iterator[str]:
    shown = [one for one in command.params if one.help and not getattr(one, "hidden", False)]
    arguments = "".join(f" {_word(one)}" for one in shown if one.param_type_name == "argument")
    yield f"\n## `{name}{arguments}`\n\n{inspect.cleandoc(command.help or '')}\n"
    if shown:
        yield "| argument, option | meaning | default |\n| --- | --- | --- |"
    for one in shown:
        option = one.opts[0] if one.param_type_name == "option" else _word(one)
        value = f" {one.metavar}" if one.param_type_name == "option" and one.metavar else ""
        default = "required" if one.required else _default(one)
        yield f"| `{option}{value}` | {one.help} | {default} |"
    for below in command.list_commands(context) if hasattr(command, "list_commands") else ():
        yield from _command(command.get_command(context, below), f"{name} {below}", context)


def _word(argument: Any) -> str:
    return argument.metavar or argument.name.upper()


def _default(option: Any) -> str:
    return f"`{option.default}`" if option.default not in (None, False, "", []) else ""
