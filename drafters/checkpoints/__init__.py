"""The files of a target model: float weights, GGUF files and quantised checkpoints, all read as float32."""
