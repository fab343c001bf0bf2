"""`meshwise model`: one model, counted."""

from __future__ import annotations

from typing import Annotated

import click
from pydantic import BaseModel, ConfigDict, Field

from meshwise.cli.options import request_options
from meshwise.cli.output import Output, output_options
from meshwise.core.dtypes import DType
from meshwise.core.units import Quantity, format_count, parse_count
from meshwise.models import load_model
from meshwise.models.lengths import check_length
from meshwise.report.model import model_report

#: Where FLOPs are counted unless told otherwise; shorter for models that cannot read so far.
DEFAULT_SEQ_LEN = 4096


class ModelRequest(BaseModel):
    """What `meshwise model` is asked."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(
        description="A built-in name, a hub name, a config.json or its folder, or dimensions (D=4096 F=14336 L=32 ...)."
    )
    seq_len: Annotated[int | None, Quantity("tokens", parse_count, format_count, "4096")] = Field(
        default=None,
        gt=0,
        le=10**9,
        description=f"Tokens of the sequence that FLOPs are counted for; {DEFAULT_SEQ_LEN}, or the model's longest.",
    )
    kv_dtype: DType = Field(default=DType.BF16, description="Number format of the KV cache.")


@click.command()
@request_options(ModelRequest, arguments=("model",))
@output_options
def model(request: ModelRequest, output: Output) -> None:
    """Count a model: parameters, FLOPs and KV cache, part by part.

    MODEL is a built-in name (see 'meshwise models'), a path to a config.json or its folder, a hub name,
    or dimensions in the book's letters: 'D=4096 F=14336 L=32 N=32 K=8 V=128256' (see also E, top_k, Fe; gated, tied).
    """
    loaded = load_model(request.model)
    seq_len = request.seq_len or min(DEFAULT_SEQ_LEN, loaded.max_seq_len or DEFAULT_SEQ_LEN)
    check_length(loaded, seq_len)
    inputs = {"model": request.model, "seq_len_tokens": seq_len, "kv_dtype": request.kv_dtype.value}
    output.show(model_report(loaded, seq_len=seq_len, kv_dtype=request.kv_dtype, inputs=inputs))
