"""Architectures known by name, one Hugging Face `config.json` each; figures only, no weights.

BERT, DistilBERT, DeBERTa and GPT-2 follow their published configs; bert-tiny is the smallest of "Well-Read Students Learn
Better" (Turc et al. 2019, arXiv 1908.08962). gpt-355m to gpt-3.8b are the models of "Memory-Efficient Pipeline-Parallel
DNN Training" (Narayanan et al. 2021, arXiv 2006.09503): its layers, widths and heads, 512 positions, GPT-2's vocabulary.
"""

__all__: list[str] = []
