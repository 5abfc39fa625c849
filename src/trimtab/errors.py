"""The error tree: what users can do wrong, each kind with a stable code.

Knows: codes, categories, how one error reads. Does not know: anything else of the package.

An error names the place (dotted path, file:line, tensor), the value found there, the rule it
breaks and, after a blank line, one action that mends it:

    finetune.lora.rank (0): must be at least 1

    hint: a rank of 8 to 64 is usual
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ErrorDoc:
    """What `trimtab explain CODE` and the documentation page say of one code."""

    code: str
    title: str
    cause: str
    action: str


class TrimtabError(Exception):
    """Base of all errors meant for users; the command line prints it without a traceback.

    Args:
        code: key of `ERROR_DOCS`, such as "TT101".
        where: dotted path, `file:line` or tensor name at fault.
        rule: what is wrong and what is allowed.
        value: the offending value, shown in parentheses after `where`.
        hint: one action that mends it.
    """

    exit_code = 2

    def __init__(
        self, code: str, where: str, rule: str, *, value: object = None, hint: str | None = None
    ) -> None:
        if code not in ERROR_DOCS:
            raise KeyError(f"error code {code} is not in ERROR_DOCS")
        self.code = code
        self.where = where
        self.rule = rule
        self.value = value
        self.hint = hint
        super().__init__(self.message)

    @property
    def message(self) -> str:
        """The full text, `[code] where (value): rule` and the hint after a blank line."""
        shown = "" if self.value is None else f" ({self.value})"
        text = f"[{self.code}] {self.where}{shown}: {self.rule}"
        return text if self.hint is None else f"{text}\n\nhint: {self.hint}"

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.code, self.where, self.rule, self.value, self.hint))


def _rebuild(
    kind: type[TrimtabError], code: str, where: str, rule: str, value: object, hint: str | None
) -> TrimtabError:
    return kind(code, where, rule, value=value, hint=hint)


class ConfigError(TrimtabError, ValueError):
    """A recipe, a command line or a cluster document is wrong."""


class ErrorList(ConfigError):  # noqa: N818  # a list of errors, not one more kind
    """Several errors found in one pass, reported together."""

    def __init__(self, errors: list[TrimtabError]) -> None:
        self.errors = errors
        first = errors[0]
        super().__init__(first.code, first.where, first.rule, value=first.value, hint=first.hint)

    @property
    def message(self) -> str:
        """All messages, one after the other."""
        return "\n\n".join(e.message for e in self.errors)

    def __reduce__(self) -> tuple[object, ...]:
        return (ErrorList, (self.errors,))


class ArchError(TrimtabError, ValueError):
    """A model's config.json cannot be turned into an architecture."""


class CheckpointError(TrimtabError, ValueError):
    """Weights on disk do not match what the architecture says must be there."""


class DataError(TrimtabError, ValueError):
    """A data file, a record in it, or a template is wrong."""


class AdapterError(TrimtabError, ValueError):
    """A LoRA target, an adapter file or a merge is wrong."""


class RunError(TrimtabError, RuntimeError):
    """A run directory or a running job is in a state that forbids what was asked."""


class OperatorError(TrimtabError, ValueError):
    """An operator was called with an argument of a wrong shape, dtype or value."""


def _docs(*rows: tuple[str, str, str, str]) -> dict[str, ErrorDoc]:
    return {code: ErrorDoc(code, title, cause, action) for code, title, cause, action in rows}


ERROR_DOCS: dict[str, ErrorDoc] = _docs(
    # 1xx: recipes and command lines
    ("TT101", "unknown key", "A recipe has a key that Trimtab does not know.",
     "Correct the spelling; the message names the nearest key."),
    ("TT102", "wrong value", "A recipe value has the wrong type or is out of range.",
     "Set a value within the rule that the message states."),
    ("TT103", "missing key", "A recipe lacks a key that has no default.",
     "Add the key; `model.path`, `finetune.data` and `output` are the ones without default."),
    ("TT104", "key of another tool", "The key belongs to PEFT, ms-swift, LLaMA-Factory or Megatron.",
     "Use the Trimtab key that the message names."),
    ("TT105", "keys contradict", "Two recipe values cannot hold together.",
     "Change one of the two named values."),
    ("TT106", "not valid YAML", "The recipe is not well-formed YAML.",
     "Mend the line that the message names; indentation and colons are the usual cause."),
    ("TT107", "file not found", "A path named in a recipe or on the command line does not exist.",
     "Check the path; relative paths start at the current directory."),
    ("TT108", "bad command line", "A flag or argument cannot be understood.",
     "See `trimtab VERB --help`."),
    ("TT110", "operator cannot run", "A recipe forces an implementation of an operator that does not "
     "run this device, dtype or shape.",
     "Leave the operator out of `ops:`; `trimtab doctor ops` says what runs here and why."),
    ("TT111", "wrong operator argument",
     "An operator of `trimtab.ops` was called with an argument of a wrong shape, dtype or value.",
     "Pass what the message asks for; inside a command this is a fault of Trimtab, please report it."),
    # 2xx: architectures
    ("TT201", "unknown model", "config.json has a model_type or preset name that is not supported.",
     "`trimtab inspect --list` names families and presets."),
    ("TT202", "bad architecture field", "A field of config.json has a wrong type or value.",
     "Compare the field with the released config.json of the same family."),
    ("TT203", "unknown architecture field",
     "config.json has a field that may change the computation and that Trimtab does not know.",
     "Update Trimtab, or remove the field if it is yours."),
    ("TT204", "not valid JSON", "A JSON file of the checkpoint cannot be parsed.",
     "Copy the file again from its source."),
    ("TT205", "stored form not supported",
     "The weights are stored in a form that Trimtab recognises and cannot read, such as NVFP4 or GGUF.",
     "Use the BF16, FP8 or INT4 release of the model; `trimtab inspect` takes every form."),
    # 3xx: checkpoints
    ("TT301", "damaged safetensors file", "The file is truncated or its header is not valid.",
     "Copy or download the file again; compare its size with the source."),
    ("TT302", "tensor missing", "A tensor that the architecture needs is in no file.",
     "Download the missing shard; `trimtab inspect DIR` lists every difference."),
    ("TT303", "tensor left over", "A file has a tensor that the architecture does not know.",
     "Check that config.json belongs to these weights."),
    ("TT304", "tensor shape or dtype", "A stored tensor has another shape or dtype than expected.",
     "Check that config.json belongs to these weights and that nothing cast them."),
    ("TT305", "incomplete directory", "A directory written by Trimtab lacks its manifest.",
     "The writing was interrupted; run the command again."),
    ("TT306", "files do not match", "A file's size or hash differs from its manifest or index.",
     "Copy the directory again or rebuild it."),
    ("TT307", "not a checkpoint", "The path holds neither weights nor a config.json.",
     "Name a directory with config.json and *.safetensors."),
    ("TT308", "duplicate tensor", "Two files hold a tensor of the same name.",
     "Remove the stale shard; the index names the right one."),
    ("TT309", "output exists", "The output directory holds something else.",
     "Choose another directory or remove that one."),
    ("TT310", "bad number in weights", "A tensor holds NaN, infinity or an invalid scale.",
     "Copy the file again; if the source has it too, report it there."),
    ("TT311", "disk too small", "The disk lacks the space that the output needs.",
     "Free space, or write to another disk."),
    ("TT312", "another conversion",
     "The output holds a conversion begun from other weights, by another command or another version.",
     "Remove the output directory and begin again, or restore what the conversion began with."),
    ("TT313", "layout does not fit", "The model cannot be divided by the degrees that were asked for.",
     "Choose degrees that divide heads, experts and layers; the message names what does not divide."),
    ("TT314", "cannot be written", "A disk or an object store refuses to take what is written.",
     "Check permissions and the store; finished files are kept, run the same command again."),
    ("TT315", "copy differs", "A tensor that was copied as it is came out with other bytes.",
     "Check the disk, and that nothing writes to the source meanwhile; then run the command again."),
    # 4xx: data
    ("TT401", "bad record", "A line of a data file is not valid JSON or lacks a needed field.",
     "Mend the line that the message names."),
    ("TT402", "no data", "A data file has no usable record.",
     "Check the path and the format; `trimtab data preview RECIPE` shows what is read."),
    ("TT403", "token id out of range", "A token id is negative or not below the vocabulary size.",
     "Check that the tokenizer belongs to this model."),
    ("TT404", "bad chat template", "The chat template fails or does not fit this conversation.",
     "Check the template and the roles in the record."),
    ("TT405", "no tokenizer", "The checkpoint has no tokenizer that Trimtab can read.",
     "Put tokenizer.json or tiktoken.model beside config.json."),
    ("TT406", "bad image", "An image of a record is missing, damaged, too large or of an unusable kind.",
     "Mend or remove the image that the message names; `on_error: skip` leaves such records out."),
    ("TT407", "images do not fit", "Images, their patch grids and the placeholder tokens disagree.",
     "Prepare prompt and images together; the message names both counts."),
    ("TT408", "answers do not fit", "A file of replayed answers belongs to other prompts, another model or "
     "another length.", "Name another file with --out, or remove the one there."),
    # 5xx: adapters
    ("TT501", "no module matches", "A LoRA target matches no module of the model.",
     "Use a name from the list in the message."),
    ("TT502", "adapter does not fit", "Keys of the adapter and of the model differ.",
     "Check that the adapter was trained on this base."),
    ("TT503", "target not allowed", "A LoRA target exists but must not be trained.",
     "Remove it from target_modules."),
    ("TT504", "no gradient", "A target received tokens but its lora_B got no gradient.",
     "Report it with the run directory; the message names the tensors."),
    ("TT505", "another base", "The adapter was trained on weights other than these.",
     "Name the base it was trained on, or accept this one by its fingerprint with --accept-base."),
    # 6xx: runs
    ("TT601", "directory of another run", "The output directory belongs to a different run.",
     "Choose another `output`, or restore the values the run began with."),
    ("TT602", "not a finite number", "Loss or gradient became NaN or infinite.",
     "Lower the learning rate, or see `finetune.on_nan`."),
    ("TT603", "state does not fit", "A saved training state does not match the run.",
     "Use the checkpoint of this run, or start anew in another directory."),
    ("TT604", "package missing", "An optional package is not installed.",
     "Install the extra that the message names."),
    ("TT605", "native kernel not available",
     "A compiled CPU kernel was asked for by name and cannot be built or loaded here.",
     "Install a C++ compiler (g++), or leave the choice of implementation to Trimtab."),
    ("TT606", "rank failed", "A process of a job on several ranks ended early.",
     "Read the first error above the message; memory and ports of the machine are the usual causes."),
    ("TT607", "tracker not usable", "A tracker of `track` could not be opened.",
     "Check its address, or leave it out: metrics.jsonl and report.html are written without it."),
)
