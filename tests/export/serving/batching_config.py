"""TF Serving's BatchingParameters message, which `tensorflow-serving-api` does not bring.

Names, numbers and types are those of servables/tensorflow/session_bundle_config.proto, as far as
they have been there since 2018: text that this class parses is text that the server's own parses.
"""

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, wrappers_pb2

WRAPPED = {
    "max_batch_size": (1, "Int64Value"),
    "batch_timeout_micros": (2, "Int64Value"),
    "max_enqueued_batches": (3, "Int64Value"),
    "num_batch_threads": (4, "Int64Value"),
    "thread_pool_name": (5, "StringValue"),
}


def _message() -> type:
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="keras_vit_tests/batching_parameters.proto",
        package="keras_vit_tests",
        syntax="proto3",
        dependency=[wrappers_pb2.DESCRIPTOR.name],
    )
    message = file.message_type.add(name="BatchingParameters")
    for name, (number, kind) in WRAPPED.items():
        message.field.add(
            name=name,
            number=number,
            type=field.TYPE_MESSAGE,
            type_name=f".google.protobuf.{kind}",
            label=field.LABEL_OPTIONAL,
        )
    message.field.add(
        name="allowed_batch_sizes", number=6, type=field.TYPE_INT64, label=field.LABEL_REPEATED
    )
    message.field.add(
        name="pad_variable_length_inputs",
        number=7,
        type=field.TYPE_BOOL,
        label=field.LABEL_OPTIONAL,
    )
    pool = descriptor_pool.Default()
    pool.Add(file)
    found = pool.FindMessageTypeByName("keras_vit_tests.BatchingParameters")
    return message_factory.GetMessageClass(found)


BatchingParameters = _message()
