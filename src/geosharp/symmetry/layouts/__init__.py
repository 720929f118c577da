"""One file per way of writing a part of a model. A layout looks at a module's structure and config, never at full names."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from geosharp.symmetry.layouts.batch_normed import batch_normed
from geosharp.symmetry.layouts.context_norm import context_norm
from geosharp.symmetry.layouts.feed_forward import feed_forward
from geosharp.symmetry.layouts.fused import fused
from geosharp.symmetry.layouts.global_attention import global_attention
from geosharp.symmetry.layouts.latent import latent_attention, latent_positions, latent_spaces
from geosharp.symmetry.layouts.mixture import mixture
from geosharp.symmetry.layouts.norms import norm_before, norm_means, offset_gains
from geosharp.symmetry.layouts.pooled import pooled
from geosharp.symmetry.layouts.position_bias import position_bias
from geosharp.symmetry.layouts.post_norm import post_norm
from geosharp.symmetry.layouts.products import factorized, sequence
from geosharp.symmetry.layouts.refused import recognized
from geosharp.symmetry.layouts.relative import relative, whole_output_mean
from geosharp.symmetry.layouts.separate import separate
from geosharp.symmetry.layouts.span_convolution import span_attention, span_convolution
from geosharp.symmetry.layouts.torch_attention import torch_attention
from geosharp.symmetry.reading import Reading
from geosharp.symmetry.site import AttentionSite

SiteLayout = Callable[[str, nn.Module, nn.Module | None], list[AttentionSite]]
Layout = Callable[[str, nn.Module, nn.Module | None], list[Reading]]

ATTENTION: dict[str, SiteLayout] = {
    "span convolution": span_attention,
    "relative": relative,
    "latent": latent_attention,
    "separate": separate,
    "mixture": mixture,
    "batch-normed": batch_normed,
    "torch": torch_attention,
    "fused": fused,
}
"""Name -> function of (module name, module, the module around it) that describes the attention layer it recognizes there,
in the ways its structure leaves open, likeliest first; the first layout that recognizes a module has it."""

OTHERS: dict[str, Layout] = {
    "feed-forward": feed_forward,
    "sequence": sequence,
    "factorized embeddings": factorized,
    "span convolution": span_convolution,
    "global attention": global_attention,
    "latent positions": latent_positions,
    "latent spaces": latent_spaces,
    "position bias": position_bias,
    "context norm": context_norm,
    "pooled queries": pooled,
    "offset gains": offset_gains,
    "norm means": norm_means,
    "norm before": norm_before,
    "post-norm": post_norm,
    "output mean": whole_output_mean,
    "recognized": recognized,
}
"""The same for parts that are no attention; every layout is asked."""
