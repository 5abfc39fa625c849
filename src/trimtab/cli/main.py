"""The command line: finds the verb, runs its module, turns errors into exit codes.

Knows: the list of verbs in the order of the job. Does not know: what any of them does; a verb's
module is imported only when it is called, so that `--help` stays fast.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence

from trimtab import __version__
from trimtab.errors import ConfigError, TrimtabError

# verb -> (module with `app`, one line of help), in the order of the job.
VERBS: dict[str, tuple[str, str]] = {
    "inspect": ("trimtab.cli.inspect", "Size, memory, layers and oddities of a model"),
    "plan": ("trimtab.cli.plan", "Memory, time and layout of a job before renting the cluster"),
    "convert": ("trimtab.cli.convert", "Stream a checkpoint into the layout of a cluster"),
    "slice": ("trimtab.cli.slice", "Cut a small checkpoint out of a large one"),
    "verify": ("trimtab.cli.verify", "Check files, numbers and structure of a checkpoint"),
    "data": ("trimtab.cli.data", "Show what training reads: records, masks, packs"),
    "finetune": ("trimtab.cli.finetune", "Train a LoRA adapter from a recipe"),
    "report": ("trimtab.cli.run_report", "Curves, experts and drift of a run on one page"),
    "evaluate": ("trimtab.cli.evaluate", "Score base and adapter on domain and general sets"),
    "generate": ("trimtab.cli.generate", "Answer a prompt with base or adapter"),
    "merge": ("trimtab.cli.merge", "Fold an adapter into its base"),
    "export": ("trimtab.cli.export", "Write a checkpoint or adapter for another tool"),
    "doctor": ("trimtab.cli.doctor", "Why something here is slow, wrong or missing"),
    "demo": ("trimtab.cli.demo", "The whole job on a tiny model, on this machine"),
    "explain": ("trimtab.cli.explain", "What an error code means and what to do"),
    "init": ("trimtab.cli.init", "Write a random checkpoint of a preset"),
}

USAGE = "usage: trimtab VERB ... [--json]"


def available_verbs() -> dict[str, str]:
    """Verbs whose module is installed, with their line of help."""
    return {
        verb: text
        for verb, (module, text) in VERBS.items()
        if importlib.util.find_spec(module) is not None
    }


def help_text() -> str:
    """What `trimtab --help` prints."""
    verbs = available_verbs()
    width = max(len(verb) for verb in verbs)
    lines = [f"  {verb:<{width}}  {text}" for verb, text in verbs.items()]
    return "\n".join([
        USAGE, "",
        "Adapt a sparse-MoE hybrid model: inspect, verify, fine-tune, evaluate, export.", "",
        "verbs, in the order of the job:", *lines, "",
        "  trimtab VERB --help   options of one verb",
        "  trimtab --version     version",
        "",
        "Data goes to stdout, progress and errors to stderr. Exit codes: 0 pass, 1 the check failed,",
        "2 usage or configuration error, 3 no feasible plan.", "",
    ])


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code.

    Args:
        argv: arguments without the program name.
    """
    try:
        return _dispatch(list(argv))
    except TrimtabError as error:
        sys.stdout.flush()
        sys.stderr.write(f"error: {error.message}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    except BrokenPipeError:
        # The reader (head, less) has gone; keep the interpreter from failing again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        (sys.stdout if argv else sys.stderr).write(help_text())
        return 0 if argv else 2
    if argv[0] in ("--version", "-V"):
        sys.stdout.write(f"trimtab {__version__}\n")
        return 0
    verb, rest = argv[0], argv[1:]
    if verb not in available_verbs():
        raise _unknown(verb)
    return _run_verb(verb, rest)


def _run_verb(verb: str, arguments: list[str]) -> int:
    import typer  # typer costs more than the rest of --help

    app: typer.Typer = importlib.import_module(VERBS[verb][0]).app
    command = typer.main.get_command(app)
    try:
        result = command(args=arguments, prog_name=f"trimtab {verb}")
    except SystemExit as exit_:
        # typer ends every command this way; None is success, text an error.
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    return result if isinstance(result, int) else 0


def _unknown(verb: str) -> ConfigError:
    verbs = available_verbs()
    near = difflib.get_close_matches(verb, verbs, n=1, cutoff=0.5)
    hint = f"did you mean `trimtab {near[0]}`?" if near else "see `trimtab --help`"
    kind = "flag" if verb.startswith("-") else "verb"
    return ConfigError("TT108", f"trimtab {verb}", f"no such {kind}", hint=hint)
