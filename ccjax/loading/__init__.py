"""Where models come from: file formats and names of models."""
