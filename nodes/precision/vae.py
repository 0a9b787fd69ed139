"""The encoder and the decoder of a VAE, each in a dtype of its own."""

from __future__ import annotations

from typing import Any

from ..host.api import io, loading
from ..host.schema import Node, declare, node_schema
from ..host.vae.file import NO_FILES, fingerprint_vae_file, list_vae_files
from .selectors import compute_input, report_output, selected_output

__all__ = ["NODES"]

CATEGORY = "Ref2V/Precision"
_ENCODER = (
    "Dtype of the encoder. default: what the loader chose. auto: bf16 where this machine has it in hardware, else fp32."
)
_DECODER = "Dtype of the decoder. default: what the loader chose. auto: fp32, since it gives the picture itself."
_REPORT = "Which half runs in what, and why; the memory that it takes."


class Ref2VSelectVAEPrecision(Node):
    """Gives the encoder and the decoder of a VAE each a dtype of their own: a BF16 encoder saves time and memory, an
    FP32 decoder keeps the picture clean.

    The VAE that comes in stays as it is, so one VAE can go into several of these in one graph. Only the half that
    changes is copied. default on both sides gives back what the loader chose, after any chain of these nodes. A dtype
    that this machine lacks is passed over, and the report says so.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        return node_schema(
            cls,
            node_id="Ref2VSelectVAEPrecision",
            display_name="Select VAE Precision",
            category=CATEGORY,
            search_aliases=["vae dtype", "fp32 vae", "bf16 vae", "fp16 vae"],
            inputs=[
                declare(io.Vae.Input, "vae", tooltip="Any VAE: of pictures, video or sound."),
                compute_input("encoder", _ENCODER),
                compute_input("decoder", _DECODER),
            ],
            outputs=[
                # not "vae": older hosts refuse one id on both sides
                declare(io.Vae.Output, "selected", display_name="vae", tooltip="The VAE in the dtypes chosen."),
                report_output(_REPORT),
            ],
        )

    @classmethod
    def validate_inputs(cls, encoder: str | None = None, decoder: str | None = None) -> bool:
        """Named here, the lists are not checked by the host: a workflow from elsewhere may name a dtype that only a
        newer version has, and it shall run.
        """
        return True

    @classmethod
    def execute(cls, vae: Any, encoder: str, decoder: str) -> io.NodeOutput:
        with loading(cls):
            from ..host.vae.select import select_vae_precision
        selected = select_vae_precision(vae, encoder, decoder)
        return selected_output(selected.vae, selected.report)


class Ref2VLoadVAE(Node):
    """Loads a VAE with the weights exactly as they are in the file. The host's own loaders round them to BF16 on most
    GPUs, and what is lost there no later node can bring back.

    Takes files of models/vae, and checkpoints, whose VAE it reads.
    """

    @classmethod
    def define_schema(cls) -> io.Schema:
        return node_schema(
            cls,
            node_id="Ref2VLoadVAE",
            display_name="Load VAE (Precision)",
            category=CATEGORY,
            search_aliases=["vae loader", "fp32 vae"],
            inputs=[
                declare(
                    io.Combo.Input,
                    "file",
                    options=list_vae_files() or [NO_FILES],
                    tooltip="A file in models/vae, or a checkpoint, of which only the VAE is read.",
                ),
                compute_input("encoder", _ENCODER),
                compute_input("decoder", _DECODER),
            ],
            outputs=[
                declare(io.Vae.Output, "vae", display_name="vae", tooltip="The VAE in the dtypes chosen."),
                report_output(_REPORT),
            ],
        )

    @classmethod
    def validate_inputs(cls, file: str | None = None, encoder: str | None = None, decoder: str | None = None) -> bool:
        """As above; and a file that is gone gets its own sentence in `execute`."""
        return True

    @classmethod
    def fingerprint_inputs(cls, file: str | None = None, encoder: str | None = None, decoder: str | None = None) -> str:
        return fingerprint_vae_file(file, encoder, decoder)

    @classmethod
    def execute(cls, file: str, encoder: str, decoder: str) -> io.NodeOutput:
        with loading(cls):
            from ..host.vae.file import load_vae_precisely
        loaded = load_vae_precisely(file, encoder, decoder)
        return selected_output(loaded.vae, loaded.report)


NODES = [Ref2VSelectVAEPrecision, Ref2VLoadVAE]
