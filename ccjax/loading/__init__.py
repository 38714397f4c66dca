"""Sources of models: file formats and names of models."""
