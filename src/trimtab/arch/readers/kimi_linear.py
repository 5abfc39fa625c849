"""config.json of `kimi_linear` (Kimi-Linear-48B-A3B) -> ArchSpec.

Knows: the released spelling and the one that transformers writes back. Does not know: the fields
that only Kimi K3 has; here they are errors, because this family would not compute them.
"""

from __future__ import annotations

from collections.abc import Mapping

from trimtab.arch.readers import kimi_text
from trimtab.arch.readers.fields import Fields
from trimtab.arch.spec import ActivationSpec, ArchSpec, DenseSpec, PlainResidual


def read(config: Mapping[str, object], source: str) -> ArchSpec:
    """Read a `kimi_linear` config.

    Args:
        config: the parsed config.json.
        source: where it came from, for messages.

    Raises:
        ArchError: a field has a wrong type or value (TT202) or is unknown (TT203).
    """
    text = Fields(config, source=source)
    text.expect("model_type", "kimi_linear", "this reader knows one family")
    eps = text.number("rms_norm_eps", positive=True)
    text.choice("hidden_act", ("silu",), default="silu")
    activation = ActivationSpec("swiglu")
    layers = kimi_text.build_layers(
        kimi_text.read_schedule(text),
        kimi_text.read_kda(text, eps),
        kimi_text.read_mla(text, gated=False, indexer=None),
        DenseSpec(text.integer("intermediate_size"), activation),
        kimi_text.read_moe(text, activation, latent=None),
    )
    length = "model_max_length" if text.present("model_max_length") else "max_position_embeddings"
    return ArchSpec(
        family="kimi_linear",
        name="Kimi Linear",
        hidden_size=text.integer("hidden_size"),
        vocab_size=text.integer("vocab_size"),
        layers=layers,
        residual=PlainResidual(),
        norm_eps=eps,
        max_position_embeddings=text.integer(length),
        dtype=kimi_text.read_dtype(text),
        tie_word_embeddings=text.boolean("tie_word_embeddings", default=False),
        bos_token_id=kimi_text.read_token_id(text, "bos_token_id"),
        eos_token_id=kimi_text.read_token_id(text, "eos_token_id"),
        pad_token_id=kimi_text.read_token_id(text, "pad_token_id"),
        unsupported=kimi_text.read_mtp(text),
        ignored=text.finish(kimi_text.NOISE),
    )
