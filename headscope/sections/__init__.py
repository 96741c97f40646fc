"""The sections of a study that come built in: measuring, and learning AdaRoPE. Each is a room like a probe's."""
