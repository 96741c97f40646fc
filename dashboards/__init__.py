"""The Dash app on stored runs."""
