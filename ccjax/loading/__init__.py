"""Where models come from: file formats and names of models. Knows no engine, request or store."""
