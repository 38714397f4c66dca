"""The demo: a made-up harbour town, its tokenizer and the small Llama trained on it. Imports nothing on its own."""
