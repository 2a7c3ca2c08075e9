"""saccade inside other libraries: what their users switch on by one call."""
