"""Loads a model: weights, tokenizer, chat template and limits from a Hugging Face directory, a GGUF file, a checkpoint
or a random preset; also saved measurements of the model.
"""
