"""What the app's playground computes with models in its worker process."""
