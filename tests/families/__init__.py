"""Tiny models of very many families of Hugging Face transformers, each with a batch that it reads."""
