"""One file per thing measured on the pulled-back loss F."""
