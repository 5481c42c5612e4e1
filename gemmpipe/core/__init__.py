"""Values and system services that all other packages use; imports no other package of gemmpipe."""
