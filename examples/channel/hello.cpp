// Lends a message: g++ -std=c++17 hello.cpp -lshunt_channel_c && ./a.out
#include <cstring>
#include <iostream>
#include <shunt_channel.hpp>

int main()
{
	auto [sender, receiver] = shunt::pair();
	auto loan = sender.loan(8 << 20);
	std::memcpy(loan->data(), "hello", 5);
	loan->truncate(5);
	sender.commit(std::move(*loan));
	auto message = receiver.borrow(std::chrono::seconds(1)); // empty if there is none in time
	std::cout << message->copy();
}
