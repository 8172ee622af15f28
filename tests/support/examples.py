"""Masks in common use, by the names of `data/mask_rules.json`."""

from apportion.ir.masks import specs as masks

EXAMPLES = {
    "causal": masks.causal(),
    "full_bidirectional": masks.full(),
    "packed_causal_documents": masks.documents([5, 7, 4]),
    "packed_full_documents": masks.documents([5, 11], masks.full()),
    "sliding_window": masks.sliding_window(6),
    "document_sliding_window": masks.documents([9, 3, 10], masks.sliding_window(4)),
    "chunked_causal": masks.chunked(8),
    "lambda_sink_window": masks.sink_window(3, 6),
    "causal_blockwise_icl": masks.causal_blockwise(4, 2),
    "shared_question": masks.shared_question(5, [4, 6, 3, 2]),
    "prefix_lm": masks.prefix_lm(6),
    "multimodal_image_spans": masks.image_spans([[4, 10], [13, 18]]),
    "block_causal_video": masks.block_causal(4, 3),
    "tree": masks.tree([[-1, 6], [0, 4], [0, 5], [2, 3], [2, 4]]),
}
