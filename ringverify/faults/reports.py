"""The field's reports, by row: where each was seen, and those of which no mutant can be made.

Letters name rows of bugs in public code, R the reports that this project started from. Behind a source, (l) is a commit
of which only the title was read, (s) published source where nobody has reported it, (r) a comment of a review.
"""

from __future__ import annotations

SOURCES: dict[str, str] = {
    "A1": "zhuzilin/ring-flash-attention 9b84a6a; jzhang38/EasyContext#14",
    "A2": "TransformerEngine#716; SHI-Labs/NATTEN#202",
    "A3": "flashinfer#4051; vllm#39148, #28181",
    "A4a": "flash-attention#978; deepseek-ai/FlashMLA#77",
    "A4b": "aten::_scaled_dot_product_flash_attention_for_cpu (s)",
    "A4c": "microsoft/torchscale dilated_attention.py (s)",
    "A6": "microsoft/torchscale dilated_attention.py (s)",
    "A8a": "vllm#28840, #47079; sglang#33064",
    "A8b": "attention-gym#200 (r)",
    "A8c": "pytorch#181645",
    "A9": "DarcStar-Solutions-Tech/dilated-attention-pytorch 56bfe37",
    "A10": "flash-attention c85cb224",
    "A11": "flash-attention c701feef",
    "A12a": "zhuzilin/ring-flash-attention#42, 756f085",
    "A12b": "flash-attention#2723; TransformerEngine 24c626dcf",
    "A12c": "zhuzilin/ring-flash-attention#42; TransformerEngine 24c626dcf",
    "A12d": "zhuzilin/ring-flash-attention#42",
    "B1": "zhuzilin/ring-flash-attention 63b1c31",
    "B2": "lucidrains/ring-attention-pytorch 51ec491, e974570",
    "B3": "TransformerEngine b3e64d19f",
    "B4": "lucidrains/ring-attention-pytorch 57cf3fc; huggingface/diffusers#13756",
    "B8a": "flash-attention#282, #436; onnx#8068",
    "B8b": "flash-attention#1778",
    "B9a": "TransformerEngine#1046; lm-engine#447 (r)",
    "B9b": "prime-rl#2828 (r)",
    "B9c": "zml#763",
    "B9d": "TransformerEngine#1046",
    "B9e": "lm-engine#447 (r)",
    "B10": "axolotl#4002 (#3608)",
    "B12": "pytorch#141429, #141622",
    "B13": "pytorch#110213, #103963",
    "B14a": "flash-attention#2374; pytorch#101967",
    "B14b": "flash-attention#2374",
    "C1a": "lucidrains/ring-attention-pytorch 054c9d5, 18a1f86",
    "C1b": "lucidrains/ring-attention-pytorch 78530bc",
    "C4a": "DeepSpeed#5664, #8317",
    "C4b": "DeepSpeed#8317",
    "C5": "DeepSpeed#7384, #7842",
    "C5b": "DeepSpeed#7842",
    "D1": "zhuzilin/ring-flash-attention 7895974; MagiAttention b56c16fc",
    "D2": "Megatron-LM 360e15290f",
    "D3a": "lucidrains/ring-attention-pytorch#9; NVIDIA/nccl#479; torchcomms#2885",
    "D3b": "lucidrains/ring-attention-pytorch#9",
    "D4": "lucidrains/ring-attention-pytorch c452069",
    "D5a": "zhuzilin/ring-flash-attention 4072701",
    "D5b": "lucidrains/ring-attention-pytorch cfb1990",
    "D6a": "TransformerEngine#1624, 611d876e3",
    "D6b": "TransformerEngine 557bd8092",
    "D6c": "TransformerEngine 557bd8092",
    "D6d": "TransformerEngine#1624",
    "D9a": "pytorch#192920, #158903; zhuzilin/ring-flash-attention 1cad320",
    "D9b": "pytorch#192920, #24836",
    "D10": "uccl#940; sgl-kernel-npu#69",
    "D11": "pytorch#185493",
    "E3a": "attorch#14; pytorch#159706",
    "E3b": "ipex-llm#12619 (l)",
    "E3c": "ipex-llm#12619 (l)",
    "F1": "lucidrains/ring-attention-pytorch a7dd365",
    "F2": "huggingface/diffusers#14265",
    "F3": "huggingface/diffusers f5e56e6720 (#14338)",
    "F4": "NATTEN#274, #299",
    "F6": "TransformerEngine 17ee10980, 74eb7c33c",
    "F7a": "lucidrains/ring-attention-pytorch 4fc040e; VeOmni#681",
    "F7b": "Megatron-LM#1635 (r); VeOmni#1120 (r)",
    "F7c": "lucidrains/ring-attention-pytorch 4fc040e; VeOmni#681",
    "F9": "zhuzilin/ring-flash-attention 22f0e1d",
    "F12a": "Burst-Attention cf429a6, 7d81ca9",
    "F12b": "Burst-Attention cf429a6",
    "G1": "lucidrains/ring-attention-pytorch cc1aea8, ab57c27",
    "G2": "Megatron-LM#1764",
    "G3a": "flash-attention#2470",
    "G3b": "flash-attention#2421, #2515 (l)",
    "G5": "xformers 41646dbb",
    "G6": "lucidrains/ring-attention-pytorch 0f748b2",
    "H1": "fkodom/dilated-attention-pytorch e8f2d3d, still at HEAD (s)",
    "H2": "fkodom/dilated-attention-pytorch HEAD (s)",
    "H3": "DarcStar-Solutions-Tech/dilated-attention-pytorch 7b6e7d4",
    "H5": "microsoft/torchscale gather_kv (s)",
    "I1a": "vllm#21996; flash-attention#2670, #2388, e7786a79; attorch#14",
    "I1b": "huggingface/diffusers 518ffdf361",
    "I1c": "flash-attention#2388",
    "I1d": "vllm#21996",
    "I1e": "vllm#21996",
    "I2a": "vllm-xpu-kernels#479; long-context-attention#128, #129; zhuzilin/ring-flash-attention#46",
    "I2b": "vllm#57012",
    "I3a": "TransformerEngine db44fc2b9, eb7653dd3",
    "I3b": "TransformerEngine eb7653dd3",
    "J1": "flash-attention#2510, #2549 (l)",
    "J2": "TransformerEngine 6e75715d9; flash-attention#2402 (l)",
    "K1a": "TransformerEngine#1896",
    "K1b": "TransformerEngine#1896",
    "K1c": "TransformerEngine#2868",
    "K2a": "TransformerEngine b4db9eb7e",
    "K2b": "TransformerEngine#1396",
}
"""Where a fault was reported, by the id of a mutant or by a row whose mutants have one source."""

OUT_OF_SCOPE: dict[str, str] = {
    "B6": "rotary embedding: q and k come already rotated, the semantics have no positions of their own",
    "B7": "rotary embedding of packed sequences: as B6",
    "E2": "overflow of int32 offsets: needs 2^31 elements, out of reach of a suite of small cases",
    "F11": "dropout: the semantics have no randomness",
    "R15": "a report of variants over several frameworks, not a fault",
    "R16": "a list of features that were recommended, not a fault",
}
"""Rows of the reports that need what the written semantics lack, and why."""

TOLD_AS = {"R10": "F1b", "B11": "O153"}
"""Reports of a fault that behaves as another one, and the id of that."""


OPERATOR = "by operator"
"""The source of a fault that nobody has reported."""


def source(id: str) -> str:
    """Return where the fault of a mutant was reported."""
    if id.startswith(("O", "R")):
        return OPERATOR if id[0] == "O" else f"report {id.rstrip('abcde')}"
    return SOURCES.get(id) or SOURCES[id.rstrip("abcde")]
