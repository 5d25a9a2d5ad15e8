"""Which architectures llama.cpp knows (the pin of third_party/llama.cpp), and facts about them that checks need.

The names are values of ``general.architecture``. The sets below say what the graph builder of an architecture demands
of the metadata; where it is not met, llama.cpp aborts the process.
"""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_GENERATES_NOT = "an embedding model; it cannot generate text in stages"
_DIFFUSES = "a diffusion model that fills in text out of order; it cannot generate text in stages"
_DRAFTS = "a draft model that needs another model's hidden states; it cannot generate text in stages"
_SPEAKS = "a speech model; it cannot generate text in stages"

UNSUPPORTED: dict[str, str] = {
    "clip": "a projector for images or audio; it cannot generate text in stages",
    "bert": _GENERATES_NOT,
    "modern-bert": _GENERATES_NOT,
    "nomic-bert": _GENERATES_NOT,
    "nomic-bert-moe": _GENERATES_NOT,
    "neo-bert": _GENERATES_NOT,
    "jina-bert-v2": _GENERATES_NOT,
    "jina-bert-v3": _GENERATES_NOT,
    "eurobert": _GENERATES_NOT,
    "gemma-embedding": _GENERATES_NOT,
    "llama-embed": _GENERATES_NOT,
    "t5": "an encoder-decoder model; it cannot generate text in stages",
    "t5encoder": "an encoder; it cannot generate text in stages",
    "dream": _DIFFUSES,
    "llada": _DIFFUSES,
    "llada-moe": _DIFFUSES,
    "rnd1": _DIFFUSES,
    "eagle3": _DRAFTS,
    "dflash": _DRAFTS,
    "gemma4-assistant": _DRAFTS,
    "wavtokenizer-dec": _SPEAKS,
    "qwen3tts": _SPEAKS,
    "pockettts": _SPEAKS,
    "gptj": "one that llama.cpp names but does not implement",
}

SUPPORTED: frozenset[str] = _names(
    """
    afmoe apertus arcee arctic arwkv7 baichuan bailingmoe bailingmoe2 bailingmoe3 bitnet bloom chameleon chatglm
    codeshell cogvlm cohere2 cohere2moe command-r dbrx deci deepseek deepseek2 deepseek2-ocr deepseek32 deepseek4
    dots1 dots3note ernie4_5 ernie4_5-moe exaone exaone-moe exaone4 falcon falcon-h1 gemma gemma2 gemma3 gemma3n
    gemma4 glm-dsa glm4 glm4moe glm5-next gpt-oss gpt2 gptneox granite granite_swa granitehybrid granitemoe
    graniteswitch grok grovemoe hrm_text hunyuan-dense hunyuan-moe hunyuan_vl hy_v3 hy_v4 internlm2 jais jais2 jamba
    kimi-k3 kimi-linear laguna lfm2 lfm2moe llama llama4 maincoder mamba mamba2 maple mellum mimo2 minicpm minicpm3
    minimax-01 minimax-m2 minimax-m3 mistral3 mistral4 mpt muse-glimmer nanbeige nemotron nemotron_h nemotron_h_moe
    olmo olmo2 olmoe openelm orion paddleocr pangu-embedded phi2 phi3 phimoe plamo plamo2 plamo3 plm qwen qwen2
    qwen2moe qwen2vl qwen3 qwen35 qwen35moe qwen3moe qwen3next qwen3vl qwen3vlmoe qwen4exp refact rwkv6 rwkv6qwen2
    rwkv7 seed_oss smallthinker smollm3 spark2_5 stablelm starcoder starcoder2 step35 talkie xverse
    """
)

RECURRENT: frozenset[str] = _names("arwkv7 mamba mamba2 rwkv6 rwkv6qwen2 rwkv7")

# no rotary position embedding: rope.* means nothing to them
WITHOUT_ROPE: frozenset[str] = RECURRENT | _names(
    "bloom glm5-next gpt2 jais jamba kimi-k3 kimi-linear mpt nemotron_h nemotron_h_moe refact"
)

# rotate by position sections; a section sum of zero divides by zero
MULTI_SECTION_ROPE: frozenset[str] = _names("paddleocr qwen2vl qwen35 qwen35moe qwen3vl qwen3vlmoe qwen4exp")

# attention.value_length may differ from attention.key_length; elsewhere the output matrix is as wide as the keys
OWN_VALUE_LENGTH: frozenset[str] = RECURRENT | _names(
    """
    bailingmoe3 deepseek2 deepseek2-ocr deepseek32 deepseek4 dots3note glm-dsa glm5-next hy_v4 kimi-k3 kimi-linear mimo2
    minicpm3 mistral4 plamo2 plamo3 plm step35
    """
)

# heads of layers with a sliding window may have another length than those of the other layers
OWN_WINDOW_LENGTHS: frozenset[str] = _names("dots3note gemma3n gemma4 laguna mimo2 spark2_5 step35")

# rope.dimension_count and attention.key_length must be equal
FULL_ROPE: frozenset[str] = _names(
    """
    apertus arcee arctic baichuan bailingmoe chameleon codeshell cogvlm cohere2moe dbrx deci deepseek dots1 ernie4_5
    ernie4_5-moe exaone exaone-moe exaone4 falcon gpt-oss granite granite_swa granitemoe graniteswitch grok grovemoe
    hunyuan-dense hunyuan-moe hunyuan_vl hy_v3 internlm2 jais2 llama llama4 maincoder mellum minicpm mistral3 olmo
    olmo2 olmoe orion paddleocr pangu-embedded plamo qwen2 qwen2moe qwen2vl qwen3 qwen3moe qwen3vl qwen3vlmoe seed_oss
    smallthinker smollm3 starcoder2 talkie xverse
    """
)

# built on state-space (Mamba) layers that share the inner size evenly among heads and groups
STATE_SPACE: frozenset[str] = _names("falcon-h1 granitehybrid jamba mamba mamba2 nemotron_h nemotron_h_moe plamo2")
TWICE_EMBEDDING_INNER_SIZE: frozenset[str] = _names("granitehybrid jamba mamba mamba2")
DELTA_NET: frozenset[str] = _names("qwen35 qwen35moe qwen3next qwen4exp")

# head_count times value_length must be embedding_length in layers with attention
EMBEDDING_WIDE_HEADS: frozenset[str] = _names(
    """
    arctic baichuan bitnet bloom chameleon chatglm codeshell cohere2 command-r dbrx deci deepseek exaone4 falcon gpt2
    gptneox grok internlm2 jais jamba lfm2 lfm2moe mpt nemotron olmo olmo2 olmoe orion phi2 phi3 phimoe plamo qwen qwen2
    qwen2moe qwen2vl stablelm starcoder starcoder2 xverse
    """
)

# mix layers with a sliding window and layers without one; at least one layer must have it where a window is set
MIXED_WINDOW: frozenset[str] = _names(
    """
    afmoe cohere2 cohere2moe exaone-moe exaone4 gemma2 gemma3 gemma3n gemma4 gpt-oss granite_swa laguna llama4 maple
    mellum mimo2 muse-glimmer olmo2 plamo3 smallthinker spark2_5 step35
    """
)

# take the gating function from the file, without a default for 0
GATING_REQUIRED: frozenset[str] = _names(
    """
    bailingmoe2 bailingmoe3 deepseek32 deepseek4 dots1 dots3note exaone-moe kimi-k3 kimi-linear lfm2moe minimax-m2
    minimax-m3 smallthinker
    """
)

# have experts in every file; without them llama.cpp aborts
EXPERTS_REQUIRED: frozenset[str] = _names("bailingmoe2 glm4moe grovemoe smallthinker")
