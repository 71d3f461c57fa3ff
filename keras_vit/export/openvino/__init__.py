"""A model as OpenVINO's two files, for Intel's runtime and its model server."""
