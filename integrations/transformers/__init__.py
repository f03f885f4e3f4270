"""Draft heads in Transformers: ``model.generate(**inputs, custom_generate=head)``."""
